"""The losses of products in 8 bits, measured while they run in bfloat16, in both frameworks."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from polymp.diagnostics.audit import Audit
from polymp.errors import PolicyError
from polymp.fp8 import loss
from polymp.fp8.recipes import INPUT_GRADIENT, RECIPES, RESULT, WEIGHT_GRADIENT
from tests.conftest import need
from tests.support.fp8_numpy import VERBS

NAMES = ("a", "b", "c")


def numbers(*, planted: bool = False) -> dict[str, np.ndarray]:
    """An input, and the weights of three layers; in the middle one, a row of outliers."""
    random = np.random.default_rng(0)
    made = {name: random.standard_normal((64, 64)).astype(np.float32) / 8 for name in NAMES}
    if planted:
        made["b"][3] *= 1e6
    return made | {"x": random.standard_normal((32, 64)).astype(np.float32)}


class Measured(NamedTuple):
    """A framework's three layers, as functions of the policy.

    Attributes:
        audit: of a step under the policy `lean`, with the losses of a recipe, and what it returned.
        explain: the report of a step under a policy.
    """

    audit: Callable[[str | None], tuple[Audit, list[np.ndarray]]]
    explain: Callable[[Any], Any]


def in_torch(given: dict[str, np.ndarray]) -> Measured:
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


def in_jax(given: dict[str, np.ndarray]) -> Measured:
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
    return {"torch": in_torch, "jax": in_jax}[framework](numbers(planted=planted))


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
    given, name = numbers(planted=True), RECIPES[recipe]
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
