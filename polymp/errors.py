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


class StuckError(PolympError, RuntimeError):
    """A scaler has skipped as many steps in a row as it was told to put up with."""


class UnscaledError(PolympError, RuntimeError):
    """An optimizer stepped on gradients of a float16 region that no scaler has scaled."""


class StaleCastError(PolympError, RuntimeError):
    """A held cast is not what its weight would give now."""


class EscapedValueError(PolympError, RuntimeError):
    """A function stored values outside of itself that are dead when its trace has ended."""


class UsageError(PolympError):
    """A command that cannot be carried out; the text says why, in a line."""


class ScalerWarning(UserWarning):
    """A loss scaler that does nothing, is missing, or is stuck."""


class PolicyWarning(UserWarning):
    """A part of a policy that has no effect where it is used."""


class VersionWarning(UserWarning):
    """A torch or jax that is newer than the last version polymp is tested with."""
