"""`polymp.keras` against Keras on JAX: fit, evaluate, predict, saving, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polymp
from polymp.errors import PolicyWarning, PolympError
from polymp.jax import autocast
from tests.conftest import need
from tests.support.jax import forms
from tests.support.processes import run

need("keras")

import keras  # noqa: E402

import polymp.keras  # noqa: E402

# Keras' own, when it saves a learning rate.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't:DeprecationWarning"
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 12)).astype("float32")
Y = np.tanh(X @ RNG.normal(size=(12, 4)) / 3).astype("float32")
HEAD_FULL = polymp.policy("amp").override(scopes={"*.head": {"all": "fp32"}})


def layers() -> list[Any]:
    return [
        keras.Input((12,)),
        keras.layers.Dense(16, activation="relu", name="up"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.1, name="drop"),
        keras.layers.Dense(4, name="head"),
    ]


def made(cls: type = keras.Sequential, optimizer: Any = None, **compiled: Any) -> Any:
    """A model with the same weights each time."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(layers(), name="net")
    if cls is not keras.Sequential:
        model = cls(model.inputs[0], model.outputs[0], name="net")
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse", **compiled)
    return model


def fit(model: Any, epochs: int = 2, **kwargs: Any) -> dict[str, list[float]]:
    keras.utils.set_random_seed(1)
    return model.fit(X, Y, 16, epochs, verbose=0, shuffle=False, **kwargs).history


def state(model: Any) -> tuple[list[Any], ...]:
    """The state that Keras gives to a train step."""
    model.optimizer.build(model.trainable_variables)
    parts = (model.trainable_variables, model.non_trainable_variables)
    parts += (model.optimizer.variables, model.metrics_variables)
    return tuple([v.value for v in part] for part in parts)


def contractions(model: Any) -> list[str]:
    """The dtypes of the first operands of all matrix products in a train step."""
    model.evaluate(X[:4], Y[:4], verbose=0)  # makes the metrics
    with forms.lowered_as("row_by_row"):  # in others, a CPU's low operands are cast once more
        lowered = jax.jit(model.train_step).lower(state(model), (X[:4], Y[:4]))
    return re.findall(r"dot_general.*: \(tensor<[0-9x]*x(\w+)>", lowered.as_text())


# Training


def test_every_product_of_a_train_step_is_low() -> None:
    model = made()
    assert set(contractions(model)) == {"f32"}
    found = contractions(polymp.keras.use(model))
    assert len(found) == 5  # up, head, their weights' gradients, and one of an input
    assert set(found) == {"bf16"}


def test_layer_names_are_module_paths() -> None:
    found = contractions(polymp.keras.use(made(), policy=HEAD_FULL))
    assert sorted(found) == ["bf16"] * 2 + ["f32"] * 3
    typo = polymp.policy("amp").override(scopes={"*.hed": {"all": "fp32"}})
    with pytest.warns(PolicyWarning, match=r"'\*\.hed': did you mean '\*\.head'"):
        contractions(polymp.keras.use(made(), policy=typo))


def test_the_loss_is_that_of_the_function_in_a_region() -> None:
    model = made()
    train, rest, _, metrics = state(model)
    given = (train, rest, metrics, X[:8], Y[:8], None)
    expected, _ = autocast(model.compute_loss_and_updates, policy="lean")(*given)
    loss, aux = polymp.keras.use(model, policy="lean").compute_loss_and_updates(*given)
    assert float(loss) == float(expected)
    assert {x.dtype.name for x in jax.tree.leaves((loss, aux))} <= {"float32", "uint32"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fit_gets_as_far_as_in_float32(dtype: str) -> None:
    plain, model = made(), polymp.keras.use(made(), dtype=dtype)
    wanted, found = fit(plain, 4), fit(model, 4, validation_data=(X, Y))
    assert found["loss"][-1] < 0.7 * found["loss"][0]
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=0.02)
    assert found["loss"] != wanted["loss"]
    assert ("loss_scale" in found) == (dtype == "float16")
    kinds = {v.dtype for v in (*model.variables, *model.optimizer.variables)}
    assert kinds <= {"float32", "int32", "uint32"}


CLASSES = np.eye(4, dtype="float32")[Y.argmax(1)]
TARGETS = {
    "binary_crossentropy": (Y > 0).astype("float32"),
    "categorical_crossentropy": CLASSES,
    "sparse_categorical_crossentropy": Y.argmax(1),
    "mean_squared_error": Y,
    "huber": Y,
    "kl_divergence": CLASSES,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("low", ["bfloat16", "float16"])
@pytest.mark.parametrize("policy", ["amp", "lean"])
@pytest.mark.parametrize(
    ("loss", "activation"),
    [
        ("binary_crossentropy", "sigmoid"),
        ("categorical_crossentropy", "softmax"),
        ("kl_divergence", "sigmoid"),
    ],
)
def test_losses_of_certain_probabilities(loss: str, activation: str, policy: str, low: str) -> None:
    """A low dtype makes them 1, whose complement has no logarithm."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(4, activation)])
    model.set_weights([8 * weight for weight in model.get_weights()])
    model.compile("sgd", loss, metrics=["mae"])
    exact = model.evaluate(X, TARGETS[loss], verbose=0)
    polymp.keras.use(model, policy=policy, dtype=low)
    assert model.evaluate(X, TARGETS[loss], verbose=0) == pytest.approx(exact, rel=0.02)


CELLS = [
    (loss, activation, low)
    for loss in TARGETS
    for activation in ("sigmoid", "softmax", None)
    for low in ("bfloat16", "float16")
    # Outputs that are clipped there have no gradient: float32 itself ends elsewhere for each seed.
    if (loss, activation) != ("kl_divergence", None)
]


@pytest.mark.one_in(10)
@pytest.mark.parametrize(("loss", "activation", "low"), CELLS)
def test_losses_and_activations_get_as_far_as_in_float32(
    loss: str, activation: str | None, low: str
) -> None:
    entropy = activation is None and "crossentropy" in loss
    name = loss.title().replace("_", "")
    of = getattr(keras.losses, name)(from_logits=True) if entropy else loss

    def last(dtype: str | None) -> float:
        keras.utils.set_random_seed(0)
        up = keras.layers.Dense(16, activation="relu")
        model = keras.Sequential([keras.Input((12,)), up, keras.layers.Dense(4, activation)])
        model.compile(keras.optimizers.Adam(0.01), of)
        if dtype:
            polymp.keras.use(model, dtype=dtype)
        return model.fit(X, TARGETS[loss], 16, 15, verbose=0, shuffle=False).history["loss"][-1]

    assert last(low) == pytest.approx(last(None), rel=0.05)


def test_evaluate_and_predict_are_in_the_region() -> None:
    model = made()
    exact, off = model.predict(X, verbose=0), model.evaluate(X, Y, verbose=0)
    polymp.keras.use(model)
    low = model.predict(X, verbose=0)
    assert low.dtype == np.float32
    assert 0 < np.abs(low - exact).max() < 0.02 * np.abs(exact).max()
    assert model.evaluate(X, Y, verbose=0) != off
    np.testing.assert_array_equal(model.predict_on_batch(X[:4]), low[:4])
    np.testing.assert_array_equal(model(X), exact)  # a plain call is as written


def scaled(scale: float, inner: Any = None) -> Any:
    """A model with a scaler of the user's own."""
    inner = inner or keras.optimizers.Adam(0.01)
    return made(optimizer=keras.optimizers.LossScaleOptimizer(inner, initial_scale=scale))


def test_the_scale_is_in_the_logs() -> None:
    model = scaled(2.0**24)
    optimizer = model.optimizer
    scales = fit(polymp.keras.use(model, dtype="float16"), 3)["loss_scale"]
    assert model.optimizer is optimizer
    assert scales == sorted(scales, reverse=True)
    assert scales[-1] == float(optimizer.dynamic_scale)
    skipped = 12 - int(optimizer.iterations)
    assert 0 < skipped < 12
    assert scales[-1] == 2.0 ** (24 - skipped)


def test_a_skipped_step_changes_no_bit() -> None:
    model = polymp.keras.use(scaled(2.0**100), dtype="float16")
    model.optimizer.build(model.trainable_variables)
    watched = (*model.trainable_variables, *model.optimizer.inner_optimizer.variables)
    before = [np.array(v) for v in watched]
    logs = model.train_on_batch(X[:8], Y[:8], return_dict=True)
    assert logs["loss_scale"] == 2.0**99
    for one, other in zip(before, watched, strict=True):
        np.testing.assert_array_equal(one, np.array(other))


@pytest.mark.long
def test_the_inner_optimizer_clips_true_gradients() -> None:
    found = []
    for scale in (2.0**4, 2.0**10):
        model = scaled(scale, inner=keras.optimizers.SGD(0.1, clipnorm=0.05))
        found.append(fit(polymp.keras.use(model, dtype="float16"))["loss"])
    np.testing.assert_allclose(*found, rtol=1e-3)


@pytest.mark.long
def test_several_steps_in_one_execution() -> None:
    one, two = made(), made(steps_per_execution=2)
    logs = [fit(polymp.keras.use(m, dtype="float16")) for m in (one, two)]
    np.testing.assert_allclose(logs[0]["loss"], logs[1]["loss"], rtol=1e-5)
    assert logs[0]["loss_scale"] == logs[1]["loss_scale"]


def test_accumulated_gradients() -> None:
    model = made(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    polymp.keras.use(model, dtype="float16")
    assert len(fit(model)["loss"]) == 2


def test_a_fixed_scale_of_the_optimizer_gives_way() -> None:
    model = made(optimizer=keras.optimizers.SGD(0.1, loss_scale_factor=8.0))
    found = fit(polymp.keras.use(model, dtype="float16"))
    wanted = fit(polymp.keras.use(made(optimizer=keras.optimizers.SGD(0.1)), dtype="float16"))
    assert found == wanted


# A train_step of the user's own


class Plain(keras.Model):
    """As in Keras' guide for JAX, with the loss function of keras.Model."""

    def train_step(self, state: Any, data: Any) -> Any:
        train, rest, optimizer, metrics = state
        x, y = data
        gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (_, aux), grads = gradient(
            train, rest, metrics, x, y, None, training=True, optimizer_variables=optimizer
        )
        train, optimizer = self.optimizer.stateless_apply(optimizer, grads, train)
        return {"mine": aux[0]}, (train, aux[2], optimizer, aux[3])


class Unscaled(Plain):
    """With a loss function of its own that forgets the scaler."""

    def compute_loss_and_updates(
        self, train: Any, rest: Any, metrics: Any, x: Any, y: Any, *_: Any, **__: Any
    ) -> Any:
        out, rest = self.stateless_call(train, rest, x, training=True)
        loss = jnp.mean((out - y) ** 2)
        return loss, (loss, out, rest, metrics)


class Scaled(Unscaled):
    """With one that scales, as the message for the one above says."""

    def compute_loss_and_updates(
        self, train: Any, rest: Any, metrics: Any, x: Any, y: Any, *_: Any, **kwargs: Any
    ) -> Any:
        loss, aux = super().compute_loss_and_updates(train, rest, metrics, x, y)
        if not kwargs["training"]:
            return loss, aux
        optimizer_variables = kwargs["optimizer_variables"]
        with keras.StatelessScope(zip(self.optimizer.variables, optimizer_variables, strict=True)):
            loss = self.optimizer.scale_loss(loss)
        return loss, aux


class Outside(Plain):
    """With a loss that calls nothing of the model's."""

    def train_step(self, state: Any, data: Any) -> Any:
        return {"mine": jnp.zeros(())}, state


@pytest.mark.parametrize("cls", [Plain, Scaled])
def test_a_train_step_of_the_user_s_own(cls: type) -> None:
    logs = fit(polymp.keras.use(made(cls), dtype="float16"))
    assert logs["mine"][-1] < logs["mine"][0]
    assert logs["loss_scale"] == [65536.0] * 2
    assert set(contractions(polymp.keras.use(made(cls)))) == {"bf16"}


# Saving


def test_a_saved_model_goes_on(tmp_path: Path) -> None:
    model = polymp.keras.use(scaled(2.0**34), dtype="float16")
    fit(model)
    model.save(tmp_path / "net.keras")
    again = keras.models.load_model(tmp_path / "net.keras")
    assert [float(v) for v in again.optimizer.variables[:4]] == [
        float(v) for v in model.optimizer.variables[:4]
    ]
    for one, other in zip(model.variables, again.variables, strict=True):
        other.assign(one.numpy())  # Keras does not save the state of dropout
    polymp.keras.use(again, dtype="float16")
    assert fit(again) == fit(model)


@pytest.mark.long
def test_another_call_replaces_the_first() -> None:
    model = polymp.keras.use(polymp.keras.use(made(), dtype="float16"), dtype="float16")
    assert not isinstance(model.optimizer.inner_optimizer, keras.optimizers.LossScaleOptimizer)
    once = polymp.keras.use(made(), policy=HEAD_FULL)
    assert contractions(polymp.keras.use(once)) == contractions(polymp.keras.use(made()))


# Refusals


def test_use_again_with_another_dtype(tmp_path: Path) -> None:
    model = polymp.keras.use(made(), dtype="float16")
    fit(model)
    steps = int(model.optimizer.iterations)
    inner = model.optimizer.inner_optimizer
    polymp.keras.use(model)
    assert model.optimizer is inner
    assert "loss_scale" not in fit(model)
    model.save(tmp_path / "net.keras")
    again = keras.models.load_model(tmp_path / "net.keras")
    assert type(again.optimizer) is type(inner)
    assert int(again.optimizer.iterations) == 2 * steps
    polymp.keras.use(again, dtype="float16")
    assert fit(again)["loss_scale"] == [65536.0] * 2
    assert int(again.optimizer.iterations) == 3 * steps


def mixed(policy: str) -> Any:
    head = keras.layers.Dense(4, dtype=policy, name="head")
    return keras.Sequential([keras.Input((12,)), head], name="net")


def recompiled() -> Any:
    model = polymp.keras.use(made(), dtype="float16")
    model.compile("sgd", "mse")
    return model


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no model": (lambda: polymp.keras.use("net"), TypeError,
        "polymp.keras.use(model) takes a keras.Model, got 'net'."),
    "a policy of Keras": (lambda: polymp.keras.use(mixed("mixed_bfloat16")), ValueError,
        "polymp.keras.use(): Dense 'head' has Keras' dtype policy 'mixed_bfloat16' and casts by "
        "itself, where no rule of polymp reaches. Make the model in float32: "
        "keras.config.set_dtype_policy('float32')."),
    "float32": (lambda: polymp.keras.use(made(), dtype="fp32"), ValueError,
        "polymp.keras.use(): dtype 'fp32' is not accepted here. Write float16 (fp16), bfloat16 "
        "(bf16), or such a dtype of torch, jax or numpy."),
    "no scaler": (lambda: fit(recompiled()), PolympError,
        "polymp.keras: Sequential 'net', in float16, has no scaler, which float16 needs. Call "
        "polymp.keras.use(model, dtype='float16') after model.compile()."),
    "a loss that is not scaled": (lambda: fit(polymp.keras.use(made(Unscaled), dtype="float16")),
        PolympError,
        "polymp.keras: Unscaled 'net', in float16, has a train_step that does not scale its loss. "
        "Differentiate the compute_loss_and_updates of keras.Model, or write `with "
        "keras.StatelessScope(zip(self.optimizer.variables, optimizer_variables)): loss = "
        "self.optimizer.scale_loss(loss)` before yours returns the loss."),
    "a step outside of the region": (lambda: fit(polymp.keras.use(made(Outside))), PolympError,
        "polymp.keras: Outside 'net', in bfloat16, has a train_step that calls neither "
        "self.compute_loss_and_updates nor self.stateless_call: nothing runs in the region. Leave "
        "polymp.keras.use() out for this model: call it for the models that the step calls, or put "
        "polymp.jax.autocast around its loss."),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, kind, text = REFUSED[name]
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == text


def test_nnx_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "is_nnx_enabled", lambda: True)
    with pytest.raises(ValueError, match=r"NNX mode.*set_nnx_enabled\(False\)"):
        polymp.keras.use(made())


OTHER = """
import keras, polymp.keras
try:
    polymp.keras.use(keras.Sequential([keras.layers.Dense(2)]))
except ValueError as error:
    print(error)
"""


@pytest.mark.long
def test_keras_on_torch_is_refused_and_says_why() -> None:
    need("torch")
    assert run(OTHER, env={"KERAS_BACKEND": "torch"}).strip() == (
        "polymp.keras.use() is for Keras on JAX, and Keras runs on torch here, where its layers "
        "cast results back to float32 after each product of a region. Keras' own policy is the "
        "better choice: keras.config.set_dtype_policy('mixed_bfloat16'), before the model is made. "
        "For Keras on JAX, set KERAS_BACKEND=jax before keras is imported."
    )
