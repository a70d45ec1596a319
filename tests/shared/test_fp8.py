"""Products in 8 bits in both frameworks: the same bits of operands, the same results."""

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import polymp
from polymp.diagnostics.audit import Audit
from polymp.errors import PolicyError
from polymp.fp8 import loss, quantise
from polymp.fp8.recipes import INPUT_GRADIENT, RECIPES, RESULT, WEIGHT_GRADIENT
from polymp.testing import ParityError, assert_parity
from tests.conftest import FRAMEWORKS, need
from tests.support.fp8_numpy import VERBS

ROLES = ("activation", "weight", "gradient")


@pytest.fixture(scope="module", autouse=True)
def _both():
    need("torch")
    need("jax")


def policy(recipe):
    return polymp.policy("fp8").override(recipe=recipe)


def numbers(*shapes):
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def in_torch(x, recipe, role, axis):
    import torch

    from polymp.backends.torch.autocast.fp8_product import VERBS

    low = x.dtype == ml_dtypes.bfloat16
    t = torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16 if low else torch.float32)
    scale = quantise.scale_of(VERBS, t, recipe, role, axis)
    made = quantise.quantised(VERBS, t, scale, recipe.format_of(role))
    return made.view(torch.uint8).numpy(), scale.numpy()


def in_jax(x, recipe, role, axis):
    import jax

    from polymp.backends.jax.autocast.fp8_operands import quantised

    axes = (0, 1) if axis is None else (axis,)
    made = jax.jit(lambda x: quantised(x, recipe, role, axes))(x)
    return np.asarray(made.values).view(np.uint8), np.asarray(made.scale)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", RECIPES)
def test_operands_have_the_same_bits(name, role):
    recipe, differ = RECIPES[name], 0
    (x,) = numbers((256, 128))
    x *= np.exp(np.random.default_rng(1).uniform(-30, 20, (256, 1))).astype(np.float32)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        for axis in (None, 0, 1):
            one = in_torch(x.astype(dtype), recipe, role, axis)
            other = in_jax(x.astype(dtype), recipe, role, axis)
            differ += np.count_nonzero(one[0] != other[0])
            assert np.array_equal(one[1].ravel(), other[1].ravel()), "scales"
    print(f"{name}, {role}: {differ} of {6 * x.size} numbers differ")
    assert differ == 0


@pytest.mark.parametrize("name", RECIPES)
def test_a_product_and_its_gradients_are_the_same(name):
    import jax
    import jax.numpy as jnp
    import torch

    import polymp.jax
    import polymp.torch

    x, w, g = numbers((64, 128), (48, 128), (64, 48))
    t, u = (torch.from_numpy(a).requires_grad_() for a in (x, w))
    with polymp.torch.autocast("cpu", policy=policy(name)):
        made = torch.nn.functional.linear(t, u)
    made.backward(torch.from_numpy(g).to(torch.bfloat16))
    theirs = [a.detach().float().numpy() for a in (made, t.grad, u.grad)]

    fn = polymp.jax.autocast(lambda x, w: x @ w.T, policy=policy(name))
    out, pull = jax.vjp(fn, jnp.asarray(x), jnp.asarray(w))
    ours = [np.asarray(a, np.float32) for a in (out, *pull(jnp.asarray(g, jnp.bfloat16)))]
    for what, one, other in zip(("result", "of x", "of w"), theirs, ours, strict=True):
        error = np.abs(one - other).max() / np.abs(one).max()
        print(f"{name}, {what}: {error:.1e}")
        assert error <= 1e-6


SIZES = (64, 64), (48, 64), (32, 48)  # x, and the weights of two layers


def torch_layers(x, w, v):
    import torch

    return torch.nn.functional.linear(torch.tanh(torch.nn.functional.linear(x, w)), v)


def jax_layers(x, w, v):
    import jax.numpy as jnp

    return jnp.tanh(x @ w.T) @ v.T


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", RECIPES)
def test_parity_of_two_layers(name):
    found = assert_parity(torch_layers, jax_layers, numbers(*SIZES), policy=policy(name))
    print(f"{name}\n{found}")
    assert found.calls[0] == found.calls[1]


def test_parity_tells_a_product_in_8_bits_from_one_in_bfloat16():
    import polymp.jax

    def first_in_bfloat16(x, w, v):
        import jax.numpy as jnp

        with polymp.jax.autocast(policy="lean"):
            h = x @ w.T
        return jnp.tanh(h) @ v.T

    with pytest.raises(ParityError) as error:
        assert_parity(
            torch_layers,
            first_in_bfloat16,
            numbers(*SIZES),
            policy="fp8",
            float32_first=False,
        )
    print(error.value)
    assert error.value.op in ("linear", "matmul")


# --- A training with products in 8 bits goes on from a checkpoint with the bits of an unbroken one


STEPS, CUT = 6, 3


def run(framework, *args):
    need(framework)
    return importlib.import_module(f"tests.support.{framework}.fp8_models").Run(*args)


@pytest.mark.filterwarnings("ignore::polymp.errors.ScalerWarning")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_goes_on_from_a_checkpoint(framework, recipe, tmp_path):
    whole = run(framework, policy(recipe))
    history = [whole.step(number) for number in range(STEPS)]
    first = run(framework, policy(recipe))
    assert [first.step(number) for number in range(CUT)] == history[:CUT]
    first.save(tmp_path / "half")
    second = run(framework, policy(recipe), 1)  # other weights
    second.load(tmp_path / "half")
    assert second.bits() == first.bits()
    rest = [second.step(number) for number in range(CUT, STEPS)]
    print(f"{framework}, {recipe}: losses {[round(loss, 4) for loss, _ in history]}")
    assert rest == history[CUT:]
    if recipe == "tensorwise":
        for part in ("model", "optimizer", "scaler"):
            other = run(framework, policy(recipe), 1)
            other.load(tmp_path / "half", without=part)
            found = [other.step(number) for number in range(CUT, STEPS)]
            assert found != rest, f"without {part} it is another run"


@pytest.mark.filterwarnings("ignore::polymp.errors.ScalerWarning")
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("before", "after"), [("lean", "fp8"), ("fp8", "lean")])
def test_a_checkpoint_of_one_policy_goes_on_under_another(framework, before, after, tmp_path):
    """There is no state of 8 bits: it goes on as a run does that changes without a checkpoint."""
    whole = run(framework, before)
    for number in range(CUT):
        whole.step(number)
    whole.save(tmp_path / "half")
    unchanged = run(framework, before, 1)
    unchanged.load(tmp_path / "half")
    changed = run(framework, after, 1)
    changed.load(tmp_path / "half")
    whole.policy = after
    expected = [whole.step(number) for number in range(CUT, STEPS)]
    assert [changed.step(number) for number in range(CUT, STEPS)] == expected
    assert [unchanged.step(number) for number in range(CUT, STEPS)] != expected


# --- The losses of products in 8 bits, measured while they run in bfloat16, in both frameworks ----


NAMES = ("a", "b", "c")


def numbers_fp8_losses(*, planted: bool = False) -> dict[str, np.ndarray]:
    """An input, and the weights of three layers; in the middle one, a row of outliers."""
    random = np.random.default_rng(0)
    made = {name: random.standard_normal((64, 64)).astype(np.float32) / 8 for name in NAMES}
    if planted:
        made["b"][3] *= 1e6
    return made | {"x": random.standard_normal((32, 64)).astype(np.float32)}


class Measured(NamedTuple):
    """A framework's three layers, as functions of the policy."""

    # of a step under the policy `lean`, with the losses of a recipe, and what it returned
    audit: Callable[[str | None], tuple[Audit, list[np.ndarray]]]
    explain: Callable[[Any], Any]  # the report of a step under a policy


def in_torch_fp8_losses(given: dict[str, np.ndarray]) -> Measured:
    import torch

    import polymp.torch

    model = torch.nn.ModuleDict({name: torch.nn.Linear(64, 64, bias=False) for name in NAMES})
    for name in NAMES:
        model[name].weight.data = torch.from_numpy(given[name].copy())
    x = torch.from_numpy(given["x"]).requires_grad_()

    def step(policy: Any) -> list[np.ndarray]:
        model.zero_grad()
        x.grad = None
        policy = polymp.policy(policy)
        scoped = polymp.torch.scoped(model, policy)
        with polymp.torch.autocast("cpu", torch.bfloat16, policy=policy.at("")):
            h = x
            for name in NAMES:
                h = model[name](h)
                h = h if name == "c" else torch.tanh(h)
            value = (h.float() ** 2).mean()
        value.backward()
        scoped.remove()
        grads = [x.grad, *(model[name].weight.grad for name in NAMES)]
        return [t.detach().numpy().copy() for t in (value, *grads) if t is not None]

    def audited(recipe: str | None) -> tuple[Audit, list[np.ndarray]]:
        with polymp.torch.audit(model, fp8=recipe) as found:
            made = step("lean")
        return found, made

    def explained(policy: Any) -> Any:
        with polymp.torch.explain(model=model) as report:
            step(policy)
        return report

    return Measured(cache(audited), explained)


def in_jax_fp8_losses(given: dict[str, np.ndarray]) -> Measured:
    import jax
    import jax.numpy as jnp

    import polymp.jax

    arrays = {name: jnp.asarray(x) for name, x in given.items()}

    def of(arrays: dict[str, jax.Array]) -> jax.Array:
        h = arrays["x"]
        for name in NAMES:
            with jax.named_scope(name):
                h = h @ arrays[name].T
            h = h if name == "c" else jnp.tanh(h)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def step(policy: Any) -> Callable[..., Any]:
        return jax.jit(jax.value_and_grad(polymp.jax.autocast(of, policy=policy)))

    def audited(recipe: str | None) -> tuple[Audit, list[np.ndarray]]:
        audit = polymp.jax.audit(step("lean"), fp8=recipe)
        value, grads = audit(arrays)
        return audit.audit, [np.asarray(x) for x in (value, *(grads[k] for k in ("x", *NAMES)))]

    return Measured(cache(audited), lambda policy: polymp.jax.explain(step(policy), arrays))


@cache
def layers(framework: str, planted: bool = False) -> Measured:
    return {"torch": in_torch_fp8_losses, "jax": in_jax_fp8_losses}[framework](
        numbers_fp8_losses(planted=planted)
    )


@pytest.fixture(params=("torch", "jax"))
def made(request):
    need(request.param)
    return partial(layers, request.param)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_layer_that_8_bits_would_hurt_is_named_and_stays_in_bfloat16(made, recipe, tmp_path):
    model = made(planted=True)
    found, _ = model.audit(recipe)
    print(found.table(fold=False))
    suggestion = found.suggest(fp8=True)
    assert suggestion.scopes == {"b": {"linear": "lower"}}
    assert len(suggestion.reasons) == 1
    (tmp_path / "mine.toml").write_text(str(suggestion))
    for policy in (tmp_path / "mine.toml", suggestion.apply("fp8")):
        calls = model.explain(policy).of("linear")
        assert {(call.module, call.rule, call.recipe) for call in calls} == {
            ("a", "fp8", recipe),
            ("b", "lower", ""),
            ("c", "fp8", recipe),
        }


def test_without_outliers_none_is_named(made):
    found, _ = made().audit("tensorwise")
    assert not found.suggest(fp8=True)
    assert [one.module for one in found.fp8_losses] == [*NAMES]
    assert found.suggest(fp8=True, limit=1.0).scopes.keys() == {*NAMES}


def test_the_step_returns_the_same_bits(made):
    model = made()
    plain, one = model.audit(None)
    tried, other = model.audit("rowwise")
    assert all(map(np.array_equal, one, other))
    assert (plain.fp8, plain.fp8_losses) == ("", ())
    assert "8 bits" not in str(plain)
    assert [m[:5] for m in tried.results] == [m[:5] for m in plain.results]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_layer_has_the_numbers_of_the_definition(made, recipe):
    """Its operands are float32 and known, so numpy's verbs have to find the same."""
    given, name = numbers_fp8_losses(planted=True), RECIPES[recipe]
    found, _ = made(planted=True).audit(recipe)
    operands = [
        loss.Operand(array, role, name.scale_axis(RESULT, role, 1), (1,))
        for array, role in ((given["x"], "activation"), (given["a"], "weight"))
    ]
    expected = loss.product_loss(VERBS, name, operands, lambda a, b: a @ b.T)
    one = found.fp8_losses[0]
    assert one.results[RESULT] == pytest.approx(float(expected[4]), rel=1e-5)
    assert one.operands["activation"].error >= float(expected[1]) * (1 - 1e-5)
    assert one.operands["weight"].error >= float(expected[3]) * (1 - 1e-5)
    products = {RESULT, INPUT_GRADIENT, WEIGHT_GRADIENT}
    assert one.results.keys() == (
        products - {WEIGHT_GRADIENT} if name.weight_gradient_high else products
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_both_frameworks_measure_the_same(recipe):
    need("torch")
    need("jax")
    one, other = (layers(name, planted=True).audit(recipe)[0] for name in ("torch", "jax"))
    worst = 0.0
    for mine, theirs in zip(one.fp8_losses, other.fp8_losses, strict=True):
        assert (mine.module, mine.operands.keys()) == (theirs.module, theirs.operands.keys())
        pairs = [(mine.results[p], theirs.results[p]) for p in mine.results]
        for role, operand in mine.operands.items():
            pairs.append((operand.error, theirs.operands[role].error))
            assert operand.zero == pytest.approx(theirs.operands[role].zero, abs=0.01)
        worst = max([worst, *(abs(a - b) / b for a, b in pairs)])
    print(f"{recipe}: at most {worst:.1e} apart")
    assert worst < 0.02  # of what is rounded to bfloat16 on its way, in one framework earlier


def test_a_recipe_that_there_is_not(made):
    with pytest.raises(PolicyError) as raised:
        made().audit("rowwis")
    assert str(raised.value) == (
        "audit(): fp8 = 'rowwis' is not one of tensorwise, rowwise, rowwise_gw_hp."
    )
