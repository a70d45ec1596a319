"""polymp: mixed precision, written once, for PyTorch and JAX.

This module imports neither framework. The users' entry points are `polymp.torch` and, once its
backend is there, `polymp.jax`. `polymp.policy` reads a policy from wherever it is.
"""

from polymp import dtypes as dtypes
from polymp import rules as rules
from polymp.errors import BackendMissingError as BackendMissingError
from polymp.errors import ForbiddenOpError as ForbiddenOpError
from polymp.errors import PolicyError as PolicyError
from polymp.errors import PolympError as PolympError
from polymp.region import Region as Region
from polymp.rules import Policy as Policy
from polymp.scaling import ScaleRule as ScaleRule
from polymp.scaling import ScaleState as ScaleState

policy = rules.load

__version__ = "0.1.0"
