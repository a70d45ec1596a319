"""Checks before a Keras model or optimizer is changed: Keras' backend, layers, the optimizer."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from polymp import adapter_checks
from polymp.rules.row import LOW

keras = adapter_checks.require("keras")


def check_backend() -> None:
    """Raise if Keras does not run on JAX, or calls the methods of a model's class."""
    backend = keras.backend.backend()
    if backend != "jax":
        raise ValueError(
            f"polymp.keras.use() is for Keras on JAX, and Keras runs on {backend} here, where its "
            "layers cast results back to float32 after each product of a region. Keras' own policy "
            "is the better choice: keras.config.set_dtype_policy('mixed_bfloat16'), before the "
            "model is made. For Keras on JAX, set KERAS_BACKEND=jax before keras is imported."
        )
    if keras.config.is_nnx_enabled():
        raise ValueError(
            "polymp.keras.use() cannot change a model in Keras' NNX mode, which calls the methods "
            "of its class. Turn it off: keras.config.set_nnx_enabled(False), before the model is "
            "made."
        )


def check_layers(model: Any) -> None:
    """Raise if a layer casts by itself."""
    for layer in _layers(model):
        policy = layer.dtype_policy
        if not {policy.compute_dtype, policy.variable_dtype}.isdisjoint(LOW):
            raise ValueError(
                f"polymp.keras.use(): {type(layer).__name__} {layer.name!r} has Keras' dtype "
                f"policy {policy.name!r} and casts by itself, where no rule of polymp reaches. "
                "Make the model in float32: keras.config.set_dtype_policy('float32')."
            )


def _layers(layer: Any) -> Iterator[Any]:
    yield layer
    for inner in getattr(layer, "layers", ()):
        yield from _layers(inner)


def check_optimizer(optimizer: Any, what: str) -> None:
    """Raise if an optimizer scales the loss itself: gradients would be divided by two scales."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{what}: {optimizer.name!r} is a {type(optimizer).__name__}, which scales the loss "
            "itself. Give the optimizer in it: optimizer.inner_optimizer."
        )
    if optimizer.loss_scale_factor is not None:
        raise ValueError(
            f"{what}: {optimizer.name!r} scales the loss itself, by loss_scale_factor="
            f"{optimizer.loss_scale_factor!r}. Make the optimizer without that argument."
        )


def check_scaler(scaler: object, asked: str, half: bool) -> None:
    """Raise if a loss scaler cannot be used; see `polymp.adapter_checks.check_scaler`."""
    from polymp.jax import GradScaler

    adapter_checks.check_scaler(
        scaler, "polymp.jax.GradScaler(init_scale=...)", GradScaler, attrgetter("enabled"),
        asked=asked, half=half, write="polymp.keras.use(model, dtype='float16', scaler=scaler)",
    )  # fmt: skip
