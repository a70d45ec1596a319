"""Everything private of torch that polymp touches, a file for each subsystem of torch.

Each function says why a name is needed and since when it exists; the tests of this folder fail
when one changes. Supported: torch 2.11 to 2.15.
"""

# Trees of arguments, for which torch has no public names. Since torch 2.2.
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
