"""polymp: mixed precision, written once, for PyTorch and JAX.

This module imports neither framework. The users' entry points are `polymp.torch` and
`polymp.jax`. `polymp.policy` reads a policy from wherever it is, `polymp.register_op` makes an op
of the user's own follow policies, `polymp.explain` says which op ran in which format, and why.
"""

from polymp import dtypes as dtypes
from polymp._api import explain as explain
from polymp._api import register_op as register_op
from polymp.diagnostics.report import Report as Report
from polymp.errors import BackendMissingError as BackendMissingError
from polymp.errors import ForbiddenOpError as ForbiddenOpError
from polymp.errors import PolicyError as PolicyError
from polymp.errors import PolympError as PolympError
from polymp.rules import policy_files as _policy_files
from polymp.rules.decisions import Decisions as Decisions
from polymp.rules.decisions import recording as recording
from polymp.rules.policy import Policy as Policy
from polymp.rules.region import Region as Region
from polymp.scaling.scale_rule import ScaleRule as ScaleRule
from polymp.scaling.scale_rule import ScaleState as ScaleState

policy = _policy_files.load

__version__ = "0.1.0"
