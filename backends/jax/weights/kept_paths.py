"""Paths of parameters that stay as they are while the others are stored low."""

from collections.abc import Iterable, Mapping

import jax

from polymp.backends.jax.arrays import is_float
from polymp.backends.jax.modules.pin import leaf_path
from polymp.errors import PolicyError
from polymp.rules import scopes


class KeptPaths:
    """Patterns of paths, as the user gave them.

    Args:
        keep: patterns as those of `pin`, or a mapping from paths to reasons.

    Raises:
        TypeError: `keep` is one string, or a function.
        PolicyError: a pattern can match no path.
    """

    def __init__(self, keep: Iterable[str]) -> None:
        if isinstance(keep, str):
            raise TypeError(f"low_weights(): keep={keep!r} is not a list. Write keep=[{keep!r}].")
        if callable(keep):
            raise TypeError(
                f"low_weights(): keep={keep!r:.80} is a function. Write "
                "keep=needs_float32(autocast(loss_fn), params, batch)."
            )
        reasons = keep if isinstance(keep, Mapping) else {}
        self.reasons: dict[str, str] = {each: reasons.get(each, "is in keep=") for each in keep}
        self.patterns: tuple[str, ...] = tuple(self.reasons)
        for pattern in self.patterns:
            scopes.check(pattern, "low_weights(): keep")

    def __contains__(self, path: str) -> bool:
        return any(scopes.depth(pattern, path) for pattern in self.patterns)

    def check(self, params: object) -> None:
        """Raise if a pattern has nothing to keep."""
        leaves = jax.tree_util.tree_leaves_with_path(params)
        paths = [leaf_path(path) for path, leaf in leaves if is_float(leaf)]
        for pattern in self.patterns:
            if not any(scopes.depth(pattern, path) for path in paths):
                some = ", ".join(paths[:3]) or "none: the tree has no float arrays"
                raise PolicyError(
                    f"low_weights(): keep has {pattern!r}, which is the path of no float "
                    f"parameter. Paths are, for example, {some}."
                )
