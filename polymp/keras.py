"""Mixed precision for Keras on JAX: `polymp.keras.use(model, policy="lean")`.

    model.compile("adam", "mse")
    polymp.keras.use(model)                        # bfloat16: fit, evaluate, predict
    polymp.keras.use(model, dtype="float16")       # the same, in Keras' LossScaleOptimizer

A model gets `compute_loss_and_updates` and `stateless_call`, the functions of arrays that Keras
differentiates and calls, back as attributes, inside `polymp.jax.autocast`. Layers open name scopes:
module paths are layer names. In float16 Keras' own optimizer scales the loss.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any, NoReturn, TypeVar

from polymp import dtypes, versions
from polymp.errors import PolympError
from polymp.rules.policy_files import Source
from polymp.rules.row import LOW

versions.require("jax")
keras = versions.require("keras")

from jax.typing import DTypeLike  # noqa: E402

from polymp.jax import autocast, upper  # noqa: E402

__all__ = ["use"]

M = TypeVar("M")


def __dir__() -> list[str]:
    return __all__


def use(model: M, policy: Source | None = None, *, dtype: DTypeLike = "bfloat16") -> M:
    """Train, evaluate and predict with a Keras model in mixed precision.

        model.compile("adam", "sparse_categorical_crossentropy")
        polymp.keras.use(model, policy="lean")
        model.fit(x, y)

    `fit`, `evaluate`, `predict`, and their like for one batch, run in a region; `model(x)` runs as
    written. A `train_step` of your own is in the region where it calls
    `self.compute_loss_and_updates` or `self.stateless_call`. Variables, gradients, the optimizer
    and what `predict` returns stay float32. Layer names are module paths: rules for "*.head" hold
    in the layer whose name is head.

    In float16 Keras' `LossScaleOptimizer` goes round the compiled optimizer, unless it is one, and
    the logs of training have `loss_scale`; a `loss_scale_factor` of the optimizer has no effect
    then. In bfloat16 it is taken off. The model is saved with it.
    Call `use` again after `load_model` and after another `compile`.

    Args:
        model: a `keras.Model` with Keras' dtype policy "float32"; compiled, if it is to train.
        policy: a policy, the name of one, a dict or a path; None for "amp".
        dtype: the low dtype, bfloat16 or float16.

    Returns:
        The model.

    Raises:
        TypeError: `model` is no Keras model, or `dtype` no dtype.
        ValueError: `dtype` is not a low dtype; Keras does not run on JAX, or in its NNX mode; or a
            layer has mixed precision of Keras' own.
        PolicyError: `policy` names none, is wrong, or has a row that jax cannot follow.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"polymp.keras.use(model) takes a keras.Model, got {model!r}.")
    _check_backend()
    dtypes.name(dtype, LOW, "polymp.keras.use(): dtype")
    _check_layers(model)
    region = _Region(model, policy, dtype)
    model._polymp_region = region
    for name in _LOW:
        setattr(model, name, partial(region.call, name))
    model.train_step, model.get_compile_config = region.train_step, region.get_compile_config
    optimizer, scaling = getattr(model, "optimizer", None), keras.optimizers.LossScaleOptimizer
    if isinstance(optimizer, scaling):
        if region.dtype != "float16":
            model.optimizer = optimizer.inner_optimizer
    elif optimizer is not None and region.dtype == "float16":
        model.optimizer = scaling(optimizer, initial_scale=2.0**16)
    model.train_function = model.test_function = model.predict_function = None
    return model


class _Region:
    """The methods that a model gets in place of its own."""

    def __init__(self, model: Any, policy: Source | None, dtype: DTypeLike) -> None:
        def widened(own: Callable[..., Any]) -> Callable[..., Any]:
            return wraps(own)(lambda *args, **kwargs: upper(own(*args, **kwargs)))

        region = autocast(dtype=dtype, policy=policy)
        self.model = model
        self.dtype: str = region.region.dtype
        before = getattr(model, "_polymp_region", None)
        self.own = before.own if before else {name: getattr(model, name) for name in _OWN}
        self.low = {name: region(widened(self.own[name])) for name in _LOW}
        self.calls = self.scalings = 0  # of the region and of the loss, in the step that is traced

    def call(self, name: str, *args: object, **kwargs: object) -> Any:
        """Call in the region; what comes out is float32, the dtype in which Keras knows it."""
        self.calls += 1
        return self.low[name](*args, **kwargs)

    def train_step(self, state: object, data: object) -> tuple[Mapping[str, Any], Any]:
        optimizer, half = self.model.optimizer, self.dtype == "float16"
        if half and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            self._refuse(
                "no scaler, which float16 needs. Call polymp.keras.use(model, dtype='float16') "
                "after model.compile()"
            )

        def scale_loss(loss: object) -> Any:
            self.scalings += 1
            return type(optimizer).scale_loss(optimizer, loss)

        self.calls = self.scalings = 0
        if half:
            optimizer.scale_loss = scale_loss
        logs, after = self.own["train_step"](state, data)
        if not self.calls:
            self._refuse(
                "a train_step that calls neither self.compute_loss_and_updates nor "
                "self.stateless_call: nothing runs in the region. Leave polymp.keras.use() out for "
                "this model: call it for the models that the step calls, or put "
                "polymp.jax.autocast around its loss"
            )
        if not half:
            return logs, after
        if not self.scalings:
            self._refuse(
                "a train_step that does not scale its loss. Differentiate the "
                "compute_loss_and_updates of keras.Model, or write `with keras.StatelessScope("
                "zip(self.optimizer.variables, optimizer_variables)): "
                "loss = self.optimizer.scale_loss(loss)` before yours returns the loss"
            )
        with keras.StatelessScope(zip(optimizer.variables, after[2], strict=True)):
            return {**logs, "loss_scale": optimizer.dynamic_scale.value}, after

    def get_compile_config(self) -> Any:
        config = self.own["get_compile_config"]()
        if config:
            config["optimizer"] = keras.saving.serialize_keras_object(self.model.optimizer)
        return config

    def _refuse(self, why: str) -> NoReturn:
        name = f"{type(self.model).__name__} {self.model.name!r}"
        raise PolympError(f"polymp.keras: {name}, in {self.dtype}, has {why}.")


_LOW = ("compute_loss_and_updates", "stateless_call")
_OWN = (*_LOW, "train_step", "get_compile_config")


def _check_backend() -> None:
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


def _check_layers(model: Any) -> None:
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
