"""polymp: mixed precision, written once, for PyTorch and JAX.

This module imports neither framework. The users' entry points are `polymp.torch` and
`polymp.jax`. `polymp.policy` reads a policy from wherever it is, `polymp.register_op` makes an op
of the user's own follow policies, `polymp.explain` says which op ran in which format, and why.
"""

from polymp import dtypes as dtypes
from polymp import loading as loading
from polymp import rules as rules
from polymp.decisions import Decisions as Decisions
from polymp.decisions import recording as recording
from polymp.errors import BackendMissingError as BackendMissingError
from polymp.errors import ForbiddenOpError as ForbiddenOpError
from polymp.errors import PolicyError as PolicyError
from polymp.errors import PolympError as PolympError
from polymp.explaining import explain as explain
from polymp.region import Region as Region
from polymp.registering import register_op as register_op
from polymp.report import Report as Report
from polymp.rules import Policy as Policy
from polymp.scaling import ScaleRule as ScaleRule
from polymp.scaling import ScaleState as ScaleState

policy = loading.load

__version__ = "0.1.0"
