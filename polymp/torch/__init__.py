"""Mixed precision for PyTorch: `from polymp.torch import autocast, GradScaler`.

What a training loop calls is imported with this module, what looks at a run or converts its weights
when it is first asked for.
"""

import importlib
import typing

from polymp.backends.torch.autocast.api import autocast, is_autocast_available
from polymp.backends.torch.autocast.custom_ops import custom_bwd, custom_fwd
from polymp.backends.torch.modules.pin import pin
from polymp.backends.torch.modules.scoped import scoped
from polymp.backends.torch.scaler.grad_scaler import GradScaler
from polymp.torch import cpu, cuda

if typing.TYPE_CHECKING:
    from polymp.backends.torch.diagnostics.audit import audit
    from polymp.backends.torch.diagnostics.catch import catch
    from polymp.backends.torch.diagnostics.explain import explain
    from polymp.backends.torch.diagnostics.locate import locate
    from polymp.backends.torch.diagnostics.record import record
    from polymp.backends.torch.scaler.optimizer_step import expect_scaler
    from polymp.backends.torch.weights.bake import bake
    from polymp.backends.torch.weights.freeze import Frozen, freeze
    from polymp.backends.torch.weights.low_weights import low_weights
    from polymp.backends.torch.weights.update_watch import UpdateWatch

__all__ = [
    "Frozen", "GradScaler", "UpdateWatch", "audit", "autocast", "bake", "catch", "cpu", "cuda",
    "custom_bwd", "custom_fwd", "expect_scaler", "explain", "freeze",
    "is_autocast_available", "locate", "low_weights", "pin", "record", "scoped",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


# The modules of what is imported late.
_LATE = {
    "Frozen": "weights.freeze",
    "UpdateWatch": "weights.update_watch",
    "audit": "diagnostics.audit",
    "bake": "weights.bake",
    "catch": "diagnostics.catch",
    "expect_scaler": "scaler.optimizer_step",
    "explain": "diagnostics.explain",
    "freeze": "weights.freeze",
    "locate": "diagnostics.locate",
    "low_weights": "weights.low_weights",
    "record": "diagnostics.record",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"polymp.backends.torch.{_LATE[name]}"), name)
    globals()[name] = found
    return found
