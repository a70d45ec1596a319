"""The errors of polymp.

Where torch.amp raises, its exception type and message are the contract and these are not used.
"""


class PolympError(Exception):
    """Any error that polymp itself raises."""


class PolicyError(PolympError, ValueError):
    """A policy that cannot be read, or that asks for what a backend cannot do."""


class ForbiddenOpError(PolympError, RuntimeError):
    """An op that the policy forbids was called in a region."""


class BackendMissingError(PolympError, ImportError):
    """A backend whose framework is not installed."""
