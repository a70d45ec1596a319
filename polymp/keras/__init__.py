"""Mixed precision for Keras on JAX: `polymp.keras.use(model, policy="lean")`.

model.compile("adam", "mse")
polymp.keras.use(model)                        # bfloat16: fit, evaluate, predict
polymp.keras.use(model, dtype="float16")       # the same, with a scaler in the optimizer
"""

from polymp.keras.region import use
from polymp.keras.scaled_optimizer import ScaledOptimizer

__all__ = ["ScaledOptimizer", "use"]


def __dir__() -> list[str]:
    return __all__
