"""`use`: the methods by which Keras trains on JAX run in a region, for one model.

`compute_loss_and_updates` and `stateless_call` are the functions of arrays that Keras
differentiates and calls. The model gets its own ones back as attributes, inside `polymp.jax.
autocast`. Layers open name scopes, so that a policy's rules by module path go by layer names.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from polymp import dtypes, integrations
from polymp.errors import PolympError
from polymp.keras.scaled_optimizer import (
    ScaledOptimizer,
    check_backend,
    check_layers,
    check_optimizer,
    check_scaler,
)
from polymp.rules.row import LOW

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from polymp.jax import GradScaler
    from polymp.rules.policy_files import Source

keras = integrations.require("keras")

M = TypeVar("M")


def use(
    model: M,
    policy: "Source | None" = None,
    *,
    dtype: "DTypeLike" = "bfloat16",
    scaler: "GradScaler | None" = None,
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
    check_backend()
    dtypes.name(dtype, LOW, "polymp.keras.use(): dtype")
    check_layers(model)
    region = _Region(model, policy, dtype)
    optimizer = _optimizer(model, region.dtype, scaler)
    for name in _OWN:
        setattr(model, name, getattr(region, name))
    if optimizer is not None:
        model.optimizer = optimizer
    model.train_function = model.test_function = model.predict_function = None
    return model


class _Region:
    """The methods that a model gets in place of its own."""

    def __init__(self, model: Any, policy: "Source | None", dtype: "DTypeLike") -> None:
        from polymp.jax import autocast, upper

        def widened(own: Callable[..., Any]) -> Callable[..., Any]:
            return wraps(own)(lambda *args, **kwargs: upper(own(*args, **kwargs)))

        region = autocast(dtype=dtype, policy=policy)
        self.model = model
        self.dtype: str = region.region.dtype
        self.own = {name: _own(model, name) for name in _OWN}
        self.low = {name: region(widened(self.own[name])) for name in _LOW}
        self.calls = 0  # into the region, in the train step that is traced

    def compute_loss_and_updates(self, *args: object, **kwargs: object) -> Any:
        return self._full("compute_loss_and_updates", *args, **kwargs)

    def stateless_call(self, *args: object, **kwargs: object) -> Any:
        return self._full("stateless_call", *args, **kwargs)

    def _full(self, name: str, *args: object, **kwargs: object) -> Any:
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
        found = optimizer.scaler_of(after[2]).state
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


def _own(model: Any, name: str) -> Callable[..., Any]:
    """A method as it is without an earlier call of `use`."""
    found: Callable[..., Any] = getattr(model, name)
    before = getattr(found, "__self__", None)
    return before.own[name] if isinstance(before, _Region) else found


def _optimizer(model: object, dtype: str, scaler: "GradScaler | None") -> Any:
    """The optimizer that the model is to get; None if it has none."""
    own = getattr(model, "optimizer", None)
    what, half = f"polymp.keras.use(model, dtype={dtype!r})", dtype == "float16"
    check_scaler(scaler, what, half)
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
    check_optimizer(inner, what)
    return ScaledOptimizer(inner, scaler) if half else inner
