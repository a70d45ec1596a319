"""Mixed precision for Keras on JAX: `polymp.keras.use(model, policy="lean")`.

    model.compile("adam", "mse")
    polymp.keras.use(model)                        # bfloat16: fit, evaluate, predict
    polymp.keras.use(model, dtype="float16")       # the same, with a scaler in the optimizer

A model gets `compute_loss_and_updates` and `stateless_call`, the functions of arrays that Keras
differentiates and calls, back as attributes, inside `polymp.jax.autocast`. Layers open name scopes:
module paths are layer names. In float16 the optimizer scales the loss and applies the gradients.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from operator import attrgetter
from typing import Any, NoReturn, TypeVar

from polymp import dtypes, scaling, versions
from polymp.errors import PolympError
from polymp.rules.policy_files import Source
from polymp.rules.row import LOW

versions.require("jax")
keras = versions.require("keras")

import jax  # noqa: E402
from jax.typing import DTypeLike  # noqa: E402

from polymp.jax import GradScaler, autocast, upper  # noqa: E402

__all__ = ["ScaledOptimizer", "use"]

M = TypeVar("M")


def __dir__() -> list[str]:
    return __all__


def use(
    model: M,
    policy: Source | None = None,
    *,
    dtype: DTypeLike = "bfloat16",
    scaler: GradScaler | None = None,
) -> M:
    """Train, evaluate and predict with a Keras model in mixed precision.

        model.compile("adam", "sparse_categorical_crossentropy")
        polymp.keras.use(model, policy="lean")
        model.fit(x, y)

    `fit`, `evaluate`, `predict`, and their like for one batch, run in a region; `model(x)` runs as
    written. A `train_step` of your own is in the region where it calls
    `self.compute_loss_and_updates` or `self.stateless_call`. Variables, gradients, the optimizer
    and what `predict` returns stay float32. Layer names are module paths: rules for "*.head" hold
    in the layer whose name is head.

    In float16 a `ScaledOptimizer` goes round the compiled optimizer, and the logs of training have
    `loss_scale` and `skipped_steps`, the number of all skipped steps. The model is saved with it.
    Call `use` again after `load_model` and after another `compile`.

    Args:
        model: a `keras.Model` with Keras' dtype policy "float32"; compiled, if it is to train.
        policy: a policy, the name of one, a dict or a path; None for "amp".
        dtype: the low dtype, bfloat16 or float16.
        scaler: for float16; None for `GradScaler()`.

    Returns:
        The model.

    Raises:
        TypeError: `model` is no Keras model, `dtype` no dtype, or `scaler` no `GradScaler`.
        ValueError: `dtype` is not a low dtype; Keras does not run on JAX, or in its NNX mode; a
            layer or the optimizer has mixed precision of Keras' own; or a scaler was given for
            bfloat16, or for a model that is not compiled.
        PolicyError: `policy` names none, is wrong, or has a row that jax cannot follow.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"polymp.keras.use(model) takes a keras.Model, got {model!r}.")
    _check_backend()
    dtypes.name(dtype, LOW, "polymp.keras.use(): dtype")
    _check_layers(model)
    region = _Region(model, policy, dtype)
    optimizer = _optimizer(model, region.dtype, scaler)
    model._polymp_region = region
    for name in _LOW:
        setattr(model, name, partial(region.call, name))
    model.train_step, model.get_compile_config = region.train_step, region.get_compile_config
    if optimizer is not None:
        model.optimizer = optimizer
    model.train_function = model.test_function = model.predict_function = None
    return model


@keras.saving.register_keras_serializable(package="polymp")
class ScaledOptimizer(keras.optimizers.LossScaleOptimizer):  # type: ignore[misc, name-defined]
    """An optimizer whose loss is scaled, in place of Keras' LossScaleOptimizer.

        model.compile(polymp.keras.ScaledOptimizer(keras.optimizers.Adam()), "mse")

    `use(model, dtype="float16")` makes it. It scales the loss and divides the gradients by the rule
    of `GradScaler`, and skips steps whose gradients are not finite: all variables of the model and
    of the inner optimizer stay as they were.

    Args:
        inner_optimizer: any Keras optimizer, its settings included, but for `loss_scale_factor`.
        scaler: with its first scale and its rule; None for `GradScaler()`.
        name: of the optimizer.

    Attributes:
        inner_optimizer: the optimizer inside.

    Raises:
        TypeError: `scaler` is no `polymp.jax.GradScaler`.
        ValueError: the inner optimizer scales the loss itself, or the scaler is disabled.
    """

    def __init__(
        self, inner_optimizer: Any, scaler: GradScaler | None = None, name: str | None = None
    ) -> None:
        call = "ScaledOptimizer(inner_optimizer)"
        _check_optimizer(inner_optimizer, call)
        _check_scaler(scaler, call, half=True)
        super().__init__(inner_optimizer, name=name)
        self.scalings = 0
        self._first = GradScaler() if scaler is None else scaler

    def build(self, variables: Sequence[Any]) -> None:
        # The variables are those of the scaler's state and those of the inner optimizer.
        for name, value in self._first.state._asdict().items():
            constant = keras.initializers.Constant(value.item())
            self.add_variable((), constant, value.dtype.name, name=name)
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        keras.optimizers.Optimizer.build(self, variables)  # without the base's scale

    @property
    def scaler(self) -> GradScaler:
        """The scaler with its present state."""
        return self._parts([v.value for v in self.variables])[1] if self.built else self._first

    def _parts(self, optimizer_variables: Sequence[Any]) -> tuple[list[Any], GradScaler, list[Any]]:
        """The values of Keras' own variables, the scaler, and those of the inner optimizer."""
        tree: Any = jax.tree.structure(self._first)
        values, end = list(optimizer_variables), len(self.variables)
        end -= len(self.inner_optimizer.variables)
        start = end - tree.num_leaves
        return values[:start], jax.tree.unflatten(tree, values[start:end]), values[end:]

    def scale_loss(self, loss: jax.Array) -> jax.Array:
        self.scalings += 1
        return self.scaler.scale(loss)

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[object],
        trainable_variables: Sequence[object],
    ) -> tuple[list[Any], list[Any]]:
        def update(grads: object, trainable: object, inner: object) -> tuple[Any, Any]:
            found: tuple[Any, Any] = self.inner_optimizer.stateless_apply(inner, grads, trainable)
            return found

        own, scaler, inner = self._parts(optimizer_variables)
        (trainable, inner), scaler, _ = scaler.step(grads, update, list(trainable_variables), inner)
        return trainable, [*own, *jax.tree.leaves(scaler), *inner]

    def apply(self, grads: Sequence[object], trainable_variables: Sequence[object] = ()) -> None:
        raise TypeError(
            "ScaledOptimizer changes no variables in place. Write values, optimizer_values = "
            "optimizer.stateless_apply(optimizer_values, grads, values)."
        )

    def get_config(self) -> dict[str, Any]:
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "inner_optimizer": inner, "scaler": self._first.state_dict()}

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, object] | None = None
    ) -> Any:
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects)
        return cls(inner, GradScaler().load_state_dict(config["scaler"]), config["name"])


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
        self.calls = 0  # into the region, in the train step that is traced

    def call(self, name: str, *args: object, **kwargs: object) -> Any:
        """Call in the region; what comes out is float32, the dtype in which Keras knows it."""
        self.calls += 1
        return self.low[name](*args, **kwargs)

    def train_step(self, state: object, data: object) -> tuple[Mapping[str, Any], Any]:
        optimizer, self.calls = self.model.optimizer, 0
        scales = isinstance(optimizer, ScaledOptimizer)
        if self.dtype == "float16" and not scales:
            self._refuse(
                "no scaler, which float16 needs. Call polymp.keras.use(model, dtype='float16') "
                "after model.compile()"
            )
        before = optimizer.scalings if scales else 0
        logs, after = self.own["train_step"](state, data)
        if not self.calls:
            self._refuse(
                "a train_step that calls neither self.compute_loss_and_updates nor "
                "self.stateless_call: nothing runs in the region. Leave polymp.keras.use() out for "
                "this model: call it for the models that the step calls, or put "
                "polymp.jax.autocast around its loss"
            )
        if not scales:
            return logs, after
        if optimizer.scalings == before:
            self._refuse(
                "a train_step that does not scale its loss. Differentiate the "
                "compute_loss_and_updates of keras.Model, or write `with keras.StatelessScope("
                "zip(self.optimizer.variables, optimizer_variables)): "
                "loss = self.optimizer.scale_loss(loss)` before yours returns the loss"
            )
        found = optimizer._parts(after[2])[1].state
        return {**logs, "loss_scale": found.scale, "skipped_steps": found.skipped}, after

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


def _optimizer(model: object, dtype: str, scaler: GradScaler | None) -> Any:
    """The optimizer that the model is to get; None if it has none."""
    own = getattr(model, "optimizer", None)
    what, half = f"polymp.keras.use(model, dtype={dtype!r})", dtype == "float16"
    _check_scaler(scaler, what, half)
    if own is None:
        if scaler is not None:
            raise ValueError(
                f"{what}: the scaler has no optimizer yet. Call model.compile() first."
            )
        return None
    scales = isinstance(own, ScaledOptimizer)
    if scales and half and scaler is None:
        return own
    inner = own.inner_optimizer if scales else own
    _check_optimizer(inner, what)
    return ScaledOptimizer(inner, scaler) if half else inner


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


def _check_optimizer(optimizer: Any, what: str) -> None:
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


def _check_scaler(scaler: object, asked: str, half: bool) -> None:
    """Raise if a loss scaler cannot be used; see `polymp.scaling.check_scaler`."""
    scaling.check_scaler(
        scaler, "polymp.jax.GradScaler(init_scale=...)", GradScaler, attrgetter("enabled"),
        asked=asked, half=half, write="polymp.keras.use(model, dtype='float16', scaler=scaler)",
    )  # fmt: skip
