"""Mixed precision for Keras on JAX: `polymp.keras.use(model, policy="lean")`.

model.compile("adam", "mse")
polymp.keras.use(model)                        # bfloat16: fit, evaluate, predict
polymp.keras.use(model, dtype="float16")       # the same, with a scaler in the optimizer
"""

from polymp.keras.region import use
from polymp.keras.scaled_optimizer import ScaledOptimizer, keras

if keras.backend.backend() == "jax":
    import polymp.jax as _jax  # noqa: F401  # for `scaler=polymp.jax.GradScaler(...)`

__all__ = ["ScaledOptimizer", "use"]


def __dir__() -> list[str]:
    return __all__
