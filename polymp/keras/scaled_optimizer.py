"""`ScaledOptimizer`: Keras' LossScaleOptimizer with the rule of `polymp.jax.GradScaler`.

Keras asks its optimizer to scale the loss (`scale_loss`) and to apply the gradients
(`stateless_apply`). The scaler's state is among the variables of the optimizer, so that Keras
saves, loads and shards it.
"""

import typing
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from polymp import integrations
from polymp.rules.row import LOW

if typing.TYPE_CHECKING:
    import jax

    from polymp.jax import GradScaler


keras = integrations.require("keras")
_LossScaleOptimizer: Any = keras.optimizers.LossScaleOptimizer


@keras.saving.register_keras_serializable(package="polymp")
class ScaledOptimizer(_LossScaleOptimizer):  # type: ignore[misc]
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
        self, inner_optimizer: Any, scaler: "GradScaler | None" = None, name: str | None = None
    ) -> None:
        from polymp.jax import GradScaler

        call = "ScaledOptimizer(inner_optimizer)"
        check_optimizer(inner_optimizer, call)
        check_scaler(scaler, call, half=True)
        super().__init__(inner_optimizer, name=name)
        self.scalings = 0
        self._first = GradScaler() if scaler is None else scaler

    def build(self, variables: Sequence[Any]) -> None:
        """Make the variables of the scaler's state and of the inner optimizer.

        Args:
            variables: to train.
        """
        for name, value in self._first.state._asdict().items():
            constant = keras.initializers.Constant(value.item())
            self.add_variable((), constant, value.dtype.name, name=name)
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        keras.optimizers.Optimizer.build(self, variables)  # without the base's scale
        trained = list(variables)
        # Keras would count a list of them as the optimizer's own.
        self._trained: Any = lambda: trained

    @property
    def scaler(self) -> "GradScaler":
        """The scaler with its present state."""
        return self.scaler_of([v.value for v in self.variables]) if self.built else self._first

    def scaler_of(self, optimizer_variables: Sequence[Any]) -> "GradScaler":
        """Return the scaler whose state is among the values of this optimizer's variables.

        Args:
            optimizer_variables: the values, as `stateless_apply` takes them.

        Returns:
            The scaler.
        """
        import jax

        tree: Any = jax.tree.structure(self._first)
        end = self._own()
        scaler: GradScaler = jax.tree.unflatten(
            tree, optimizer_variables[end - tree.num_leaves : end]
        )
        return scaler

    def _own(self) -> int:
        """How many of `variables` are not the inner optimizer's; the state is the last of them."""
        return len(self.variables) - len(self.inner_optimizer.variables)

    def scale_loss(self, loss: "jax.Array") -> "jax.Array":
        """Multiply a loss by the scale.

        Args:
            loss: float [].

        Returns:
            The product, float32 or wider [].
        """
        self.scalings += 1
        return self.scaler.scale(loss)

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[object],
        trainable_variables: Sequence[object],
    ) -> tuple[list[Any], list[Any]]:
        import jax

        def update(grads: object, trainable: object, inner: object) -> tuple[Any, Any]:
            found: tuple[Any, Any] = self.inner_optimizer.stateless_apply(inner, grads, trainable)
            return found

        end = self._own()
        scaler, inner = self.scaler_of(optimizer_variables), list(optimizer_variables[end:])
        (trainable, inner), scaler, _ = scaler.step(grads, update, list(trainable_variables), inner)
        state = jax.tree.leaves(scaler)
        return trainable, [*optimizer_variables[: end - len(state)], *state, *inner]

    def apply(self, grads: Sequence[object], trainable_variables: Sequence[object] = ()) -> None:
        """Divide gradients by the scale, and step or skip, in place.

        Args:
            grads: multiplied by the scale.
            trainable_variables: needed in the first call, if the optimizer is not built.
        """
        if not self.built:
            self.build(list(trainable_variables))
        variables = self._trained()
        values = [v.value for v in variables]
        trainable, own = self.stateless_apply([v.value for v in self.variables], grads, values)
        for variable, value in zip((*variables, *self.variables), (*trainable, *own), strict=True):
            variable.assign(value)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments as plain data: the scaler's first state and rule, the optimizer."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "inner_optimizer": inner, "scaler": self._first.state_dict()}

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, object] | None = None
    ) -> Any:
        """Make the optimizer that `get_config` described.

        Args:
            config: as `get_config` returned it.
            custom_objects: classes by name, for Keras.

        Returns:
            The optimizer, not built.
        """
        from polymp.jax import GradScaler

        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects)
        return cls(inner, GradScaler().load_state_dict(config["scaler"]), config["name"])


# Checks before a Keras model or optimizer is changed: Keras' backend, layers, the optimizer.


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
    """Raise if a loss scaler cannot be used; see `polymp.integrations.check_scaler`."""
    from polymp.jax import GradScaler

    integrations.check_scaler(
        scaler, "polymp.jax.GradScaler(init_scale=...)", GradScaler, attrgetter("enabled"),
        asked=asked, half=half, write="polymp.keras.use(model, dtype='float16', scaler=scaler)",
    )  # fmt: skip
