"""Mixed precision for JAX: `from polymp.jax import autocast, GradScaler`."""

from polymp.backends.jax.autocast.api import autocast, lower, upper
from polymp.backends.jax.diagnostics.audit import Audited, audit, locate
from polymp.backends.jax.diagnostics.catch import catch
from polymp.backends.jax.diagnostics.explain import explain
from polymp.backends.jax.diagnostics.record import Recorded, record
from polymp.backends.jax.diagnostics.update_watch import UpdateWatch
from polymp.backends.jax.modules.scoped import scoped
from polymp.backends.jax.scaler.grad_scaler import GradScaler
from polymp.backends.jax.scaler.optimizer_step import expect_scaler
from polymp.backends.jax.weights.freeze import Frozen, freeze
from polymp.backends.jax.weights.low_weights import LowWeightsState, low_weights

__all__ = [
    "Audited", "Frozen", "GradScaler", "LowWeightsState", "Recorded", "UpdateWatch",
    "audit", "autocast", "catch", "expect_scaler", "explain", "freeze",
    "locate", "low_weights", "lower", "record", "scoped", "upper",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
