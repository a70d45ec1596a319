"""Rounding errors that `audit` measures: the same in both frameworks, on the same numbers."""

import functools
from typing import Any, NamedTuple

import numpy as np
import pytest

from polymp import text_table
from polymp.diagnostics.audit import Audit
from tests.conftest import need
from tests.support import frameworks
from tests.support.regions import audited, region

WEIGHTS = ((32, 64), (64, 64), (64, 4))


class Audited(NamedTuple):
    """An audit, and by its own gradients the share of zeros in those of the weights."""

    audit: Audit
    zeros: float


@functools.cache
def trained(framework: str, dtype: str, factor: float) -> Audited:
    """A step of three layers in which the loss is multiplied by a factor before the backward."""
    need(framework)
    random = np.random.default_rng(0)
    weights = [random.standard_normal(s).astype(np.float32) / s[0] ** 0.5 for s in WEIGHTS]
    x = random.standard_normal((16, 32)).astype(np.float32)
    if framework == "torch":
        import torch

        import polymp.torch

        ws = [torch.tensor(w, requires_grad=True) for w in weights]
        with polymp.torch.audit() as audit:
            with polymp.torch.autocast("cpu", getattr(torch, dtype)):
                a, b, c = ws
                y = (torch.tensor(x) @ a).tanh() @ b @ c
                loss = torch.nn.functional.cross_entropy(y, torch.arange(16) % 4)
            (loss * factor).backward()
        gradients = [w.grad.numpy() for w in ws if w.grad is not None]
    else:
        import jax
        import optax

        import polymp.jax

        @functools.partial(polymp.jax.autocast, dtype=dtype)
        def loss(ws: Any, x: Any) -> Any:
            a, b, c = ws
            y = jax.numpy.tanh(x @ a) @ b @ c
            return optax.losses.softmax_cross_entropy_with_integer_labels(
                y, np.arange(16) % 4
            ).mean()

        audited = polymp.jax.audit(jax.grad(lambda ws, x: loss(ws, x) * factor))
        gradients, audit = list(map(np.asarray, audited(weights, x))), audited.audit
    return Audited(audit, float(np.mean([(g == 0).mean() for g in gradients])))


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("factor", [1e-6, 3e-8, 1e-10])
def test_gradients_that_float16_made_zero_are_no_healthy_ones(
    framework: str, factor: float
) -> None:
    low = trained(framework, "float16", factor)
    assert low.zeros > 0.3, "nothing vanished"
    lost = low.audit.lost_gradients()
    assert lost > 0.5
    said = text_table.share(lost)
    assert f"gradients that become zero in float16: {said} unscaled" in str(low.audit)
    suggestion = low.audit.suggest()
    assert suggestion.reasons[0].startswith(f"gradients: {said} of the values")
    assert suggestion.init_scale is not None, suggestion
    tried = trained(framework, "float16", factor * suggestion.init_scale)
    assert tried.zeros < 0.01
    assert tried.audit.fault is None


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_what_would_vanish_in_float16_is_said_where_it_did_not_run(framework: str) -> None:
    audit = trained(framework, "bfloat16", 1e-6).audit
    suggestion = audit.suggest()
    assert not suggestion, "a run in bfloat16 needs nothing"
    said = text_table.share(audit.lost_gradients())
    assert suggestion.reasons[0].startswith(f"gradients: {said} of the values")
    assert f"{audit.fitting_scale():g}" in suggestion.reasons[0]
    assert not trained(framework, "bfloat16", 1.0).audit.suggest().reasons


class Errors(NamedTuple):
    """An audit with rounding errors, and what the program itself returned, in float32."""

    audit: Audit  # of the call
    product: Any  # of a matrix product in the region
    loss: float  # the mean of its tanh times a cosine of positions


X, W = (np.random.default_rng(1).standard_normal(s).astype(np.float32) for s in ((16, 32), (32, 8)))
FREQUENCIES = (100.0 ** -np.linspace(0, 1, 8)).astype(np.float32)


@functools.cache
def measured(framework: str, dtype: str, start: int, rounding: bool = True) -> Errors:
    """A product in a region, and positions that begin at a number and are in the region's dtype."""
    need(framework)
    if framework == "torch":
        import torch

        import polymp.torch

        low, w = getattr(torch, dtype), torch.tensor(W, requires_grad=True)
        with polymp.torch.audit(rounding=rounding) as audit:
            with polymp.torch.autocast("cpu", low):
                at = (torch.arange(16) + start).to(low)[:, None] * torch.tensor(FREQUENCIES).to(low)
                product = torch.tensor(X) @ w
                loss = (product.tanh_() * at.cos()).float().square().mean()
            loss.backward()
        return Errors(audit, product.detach().float().numpy(), float(loss.detach()))
    import jax
    import jax.numpy as jnp

    import polymp.jax

    @functools.partial(polymp.jax.autocast, dtype=dtype)
    def loss(w: Any, x: Any) -> Any:
        at = (jnp.arange(16) + start).astype(dtype)[:, None] * jnp.asarray(FREQUENCIES).astype(
            dtype
        )
        product = x @ w
        wave = jnp.tanh(product) * jnp.cos(at)
        return jnp.mean(wave.astype(jnp.float32) ** 2), product

    audited = polymp.jax.audit(jax.value_and_grad(loss, has_aux=True), rounding=rounding)
    (value, product), _ = audited(W, X)
    return Errors(audited.audit, np.asarray(product, np.float32), float(value))


def row(audit: Audit, *ops: str) -> Any:
    """The forward row of an op, by one of its names in the two frameworks."""
    return next(m for m in audit.results if m.op in ops and m.direction == "forward")


def off(low: Any, wide: Any) -> float:
    return float(np.linalg.norm(low - wide) / np.linalg.norm(wide))


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_op_has_its_own_error(framework: str, dtype: str) -> None:
    found = measured(framework, dtype, 0)
    product = row(found.audit, "matmul", "linear")
    wide = X @ W
    if framework == "jax":  # in torch it is written over
        assert product.rounding == pytest.approx(off(found.product, wide), rel=1e-2)
    eps = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    assert eps / 8 < product.rounding < eps
    assert row(found.audit, "cos").rounding < eps
    assert found.audit.to_dict()["results"][0].keys() >= {"rounding", "loss_effect"}
    assert "rounding: percent by which an op is off" in str(found.audit)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_what_was_not_measured_is_said(framework: str) -> None:
    audit = measured(framework, "bfloat16", 0, rounding=False).audit
    assert all(m.rounding is None for m in (*audit.results, *audit.gradients))
    assert "rounding errors: not measured, audit(..., rounding=True) does" in str(audit)
    assert measured(framework, "bfloat16", 0).loss == measured(framework, "bfloat16", 0, False).loss


class Layers(NamedTuple):
    """An audit of a net of three products, and by how much rounding changes its loss."""

    audit: Audit  # of a step in which all three run low; the loss is in float32
    change: float  # of that step's loss, as a fraction of it
    # likewise, by each of the products, with those before it low and those after it not
    each: list[float]


@functools.cache
def three_layers(framework: str, dtype: str, scale: float = 1.0) -> Layers:
    """A step of a net whose loss is multiplied by a loss scale."""
    need(framework)
    fw = frameworks.load(framework)
    random = np.random.default_rng(3)
    a, b, c = (fw.array(random.standard_normal(s) / s[0] ** 0.5) for s in WEIGHTS)
    x = fw.array(random.standard_normal((16, 32)))

    def layer(product: Any, low: bool) -> Any:
        y = region(framework, dtype)(product)() if low else product()
        return fw.xp.tanh(fw.cast(y, "float32"))

    def loss(a: Any, low: int = 3) -> Any:
        y = layer(lambda: x @ a, low > 0)  # a product at a line, for each is a row
        z = layer(lambda: y @ b, low > 1)
        return ((layer(lambda: z @ c, low > 2) - 0.5) ** 2).mean() * scale

    audit = audited(framework, lambda a: fw.grad(loss, a)[1], a, rounding=True)
    losses = [float(fw.numbers(loss(a, low))) for low in range(4)]
    each = np.diff(losses) / losses[-1]
    return Layers(audit, float(each.sum()), list(each))


def effects(audit: Audit) -> list[float]:
    """The effects on the loss of the products of a forward pass, in its order."""
    return [m.loss_effect for m in audit.results if m.loss_effect is not None]


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_effects_on_the_loss_add_up_to_its_change(framework: str, dtype: str, scale: float) -> None:
    found = three_layers(framework, dtype, scale)
    assert abs(found.change) > 1e-6, "there is nothing to measure"
    assert found.audit.loss_effect == pytest.approx(found.change, rel=0.05)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_each_effect_on_the_loss_is_that_of_its_op(framework: str) -> None:
    found = three_layers(framework, "bfloat16")
    measured = effects(found.audit)
    assert measured == pytest.approx(found.each, rel=0.1)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_positions_that_collapse_move_the_loss_most(framework: str) -> None:
    """They need no gradient: in torch their errors stand where they meet what needs one."""
    far = measured(framework, "bfloat16", 65536).audit
    near = measured(framework, "bfloat16", 0).audit
    worst = max(effects(far), key=abs)
    first = {"torch": "cos", "jax": "to"}[framework]
    assert row(far, first).loss_effect == worst
    assert abs(worst) > 0.05 > 10 * abs(near.loss_effect)
    table = far.table(sort="loss", width=200).partition("-- forward")[2].splitlines()
    assert table[2].split()[0] == first


def test_a_step_without_a_backward_pass_says_that_effects_were_not_measured(fw: Any) -> None:
    weight = fw.array(W).requires_grad_() if fw.name == "torch" else fw.array(W)
    low = region(fw.name, "bfloat16")(lambda x, w: ((x @ w) ** 2).mean())
    audit = audited(fw.name, low, fw.array(X), weight, rounding=True)
    assert audit.loss_effect is None
    assert all(m.loss_effect is None for m in audit.results)
    assert row(audit, "matmul", "linear").rounding > 0
    assert "of the loss: not measured, for it needs the backward pass" in str(audit)
    assert three_layers(fw.name, "bfloat16").audit.loss_effect is not None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_effects_in_loops_and_of_several_calls_in_jax(dtype: str) -> None:
    """They are the mean of the calls; metrics that are computed after the loss are no loss."""
    need("jax")
    import jax
    import jax.numpy as jnp
    from jax import lax

    import polymp.jax

    random = np.random.default_rng(0)
    arrays = [random.standard_normal(s).astype(np.float32) / 8 for s in ((32, 64), (64, 64))]
    y = random.standard_normal((64, 64)).astype(np.float32)

    def net(arrays: Any, x: Any) -> Any:
        first, again = arrays

        def body(h: Any, _: Any) -> Any:
            return lax.cond(h.sum() > 1e9, jnp.sin, lambda h: jnp.tanh(h @ again), h), None

        x = lax.while_loop(lambda x: jnp.abs(x).max() > 4, lambda x: x / 2, x)
        return lax.scan(body, jax.nn.gelu(x @ first), None, length=2)[0]

    def loss(arrays: Any, x: Any, enabled: bool = True) -> Any:
        low = polymp.jax.autocast(net, dtype=dtype, policy="lean", enabled=enabled)
        out = low(arrays, x).astype(jnp.float32)
        return jnp.mean((out - y) ** 2), jnp.mean((out > 0).astype(jnp.float32))

    audited = polymp.jax.audit(jax.jit(jax.value_and_grad(loss, has_aux=True)), rounding=True)
    changes = []
    for _ in range(2):
        x = random.standard_normal((64, 32)).astype(np.float32)
        (low, _), _ = audited(arrays, x)
        changes.append(1 - float(loss(arrays, x, False)[0]) / float(low))
    assert abs(np.mean(changes)) > 1e-6, "there is nothing to measure"
    assert audited.audit.loss_effect == pytest.approx(np.mean(changes), rel=0.1)


def test_effects_of_several_losses_in_one_jax_program() -> None:
    """Of two backward passes, in a loop or not, it is the mean; of a loss summed up, the sum's."""
    need("jax")
    import jax
    import jax.numpy as jnp
    from jax import lax

    import polymp.jax

    random = np.random.default_rng(0)
    w = jnp.asarray(random.standard_normal((32, 8)), "float32")
    batches = jnp.asarray(random.standard_normal((2, 16, 32)), "float32")

    def loss(w: Any, x: Any, low: bool = True) -> Any:
        product = polymp.jax.autocast(lambda x, w: x @ w, dtype="bfloat16", enabled=low)
        return jnp.mean((jnp.tanh(product(x, w).astype(jnp.float32)) - 0.5) ** 2)

    def one_by_one(w: Any, batches: Any) -> Any:
        return [jax.grad(loss)(w, x) for x in batches]

    def looped(w: Any, batches: Any) -> Any:
        return lax.scan(lambda w, x: (w, jax.grad(loss)(w, x)), w, batches)

    def summed(w: Any, batches: Any, low: bool = True) -> Any:
        return lax.scan(lambda sum, x: (sum + loss(w, x, low), None), 0.0, batches)[0]

    def effect(step: Any) -> Any:
        audited = polymp.jax.audit(step, rounding=True)
        audited(w, batches)
        return audited.audit.loss_effect

    change = np.mean([1 - loss(w, x, False) / loss(w, x) for x in batches])
    assert abs(change) > 1e-6, "there is nothing to measure"
    assert effect(one_by_one) == pytest.approx(change, rel=0.1)
    assert effect(looped) == pytest.approx(change, rel=0.1)
    whole = 1 - float(summed(w, batches, False) / summed(w, batches))
    assert effect(jax.grad(summed)) == pytest.approx(whole, rel=0.1)


def test_effects_are_relative_to_the_loss_that_backward_is_called_on() -> None:
    """A sum of a loss and a small term, whose gradient no op makes."""
    need("torch")
    import torch

    import polymp.torch

    torch.manual_seed(0)
    net, x = torch.nn.Linear(16, 8), torch.randn(64, 16)

    def loss_of() -> torch.Tensor:
        y = net(x)
        return torch.nn.functional.cross_entropy(y, torch.arange(64) % 8) + 0.01 * y.float().mean()

    with polymp.torch.audit(net, rounding=True) as audit:
        with polymp.torch.autocast("cpu", torch.bfloat16, policy="amp"):
            loss = loss_of()
        loss.backward()
    with torch.no_grad():
        exact = loss_of()
    true = float((loss.detach() - exact) / exact)
    assert audit.loss_effect == pytest.approx(true, rel=0.2)
