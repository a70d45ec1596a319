"""`catch` in JAX: the step that is stopped at, the state that is given back, what it cannot see."""

from __future__ import annotations

import math
import warnings
from functools import cache, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from polymp.errors import BadStepError, CatchWarning
from polymp.jax import GradScaler, autocast, catch
from tests.support.jax.scaler_tools import bits, by_optax
from tests.support.sizes import size

TX = optax.adam(1e-2)
X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ params["up"]) @ params["down"]) ** 2


def start(dtype: str = "bfloat16") -> tuple[Any, Any, GradScaler]:
    key = jax.random.key(0)
    params = {"up": jax.random.normal(key, (8, 6)), "down": jax.random.normal(key, (6, 2))}
    return params, TX.init(params), GradScaler(init_scale=2.0**10, enabled=dtype == "float16")


@cache
def train_step(dtype: str, donate: bool) -> Any:
    """A step that returns its state and the loss, with a scaler that is off in bfloat16."""
    low = autocast(loss_fn, dtype=dtype)

    def step(params: Any, moments: Any, scaler: GradScaler, x: Any) -> Any:
        def scaled(params: Any) -> Any:
            return scaler.scale(loss := low(params, x)), loss

        grads, loss = jax.grad(scaled, has_aux=True)(params)
        (params, moments), scaler, _ = scaler.step(grads, by_optax(TX), params, moments)
        return params, moments, scaler, loss

    return jax.jit(step, donate_argnums=(0, 1, 2) if donate else ())


def by_hand(dtype: str, factors: list[float]) -> Any:
    state = start(dtype)
    for factor in factors:
        *state, _ = train_step(dtype, False)(*state, X * np.float32(factor))
    return state


def checked(step: Any, *args: Any) -> Any:
    """Do a step, and wait for what it found."""
    result = step(*args)
    step.check()
    return result


@pytest.mark.one_in(2)
@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_healthy_training_is_left_alone_and_the_state_before_a_bad_step_is_given(
    dtype: str, donate: bool
) -> None:
    step, state = catch(train_step(dtype, donate), every=3), start(dtype)
    factors = [1.0, 0.5, 2.0, 1.5]
    for factor in factors:
        *state, _ = step(*state, X * np.float32(factor))
    expected = by_hand(dtype, factors)
    assert bits(state) == bits(expected)
    with pytest.raises(BadStepError, match=r"^step 4: the loss is NaN\n  linear") as raised:
        checked(step, *state, X * np.float32(math.nan))
    (*last_good, x), _ = raised.value.last_good
    assert bits(last_good) == bits(expected)
    assert np.isnan(x).all()
    *state, loss = step(*last_good, X)
    assert jnp.isfinite(loss)
    assert bits(state) == bits(by_hand(dtype, [*factors, 1.0]))


def test_the_report_ends_with_what_may_help() -> None:
    low = jax.value_and_grad(autocast(lambda w, x: jnp.mean((x @ w).astype(jnp.float32) ** 2)))

    @catch
    @jax.jit
    def step(w: Any, x: Any) -> Any:
        loss, grad = low(w, x)
        return w - 1e30 * grad, loss

    w, _ = step(jnp.ones((8, 1)), X)
    for batch, remedy in ((math.nan, "Look at the data"), (1.0, "lower the learning rate")):
        with pytest.raises(BadStepError) as raised:
            checked(step, w, X * np.float32(batch))
        assert remedy in raised.value.report.remedy
        assert str(raised.value.report).endswith(raised.value.report.remedy)


@settings(max_examples=size(4, 12), deadline=None)
@given(
    bad=st.lists(st.booleans(), min_size=1, max_size=10),
    every=st.integers(1, 4),
    dtype=st.sampled_from(["float16", "bfloat16"]),
    donate=st.booleans(),
)
def test_training_goes_on_without_the_bad_batches(
    bad: list[bool], every: int, dtype: str, donate: bool
) -> None:
    """`on_bad="report"`: the state is that of a training that never saw them."""
    bad[0] = False  # before the first step has returned there is no state to go back to
    step = catch(train_step(dtype, donate), every=every, on_bad="report")
    state, taken = start(dtype), list[float]()
    for at, spoiled in enumerate(bad):
        factor = math.nan if spoiled else 1.0 + at / 8
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CatchWarning)
            try:
                *state, _ = step(*state, X * np.float32(factor))
            except BadStepError:  # the third in a row
                return
        taken += [] if spoiled else [factor]
    seen = [r.step for r in step.reports]
    assert all(bad[at] for at in seen)
    if every == 1 and not bad[step.step - 1]:  # found out before the next step began
        assert seen == [at for at, spoiled in enumerate(bad[: step.step]) if spoiled]
        assert bits(state) == bits(by_hand(dtype, taken))


@jax.jit
def root_step(w: Any, x: Any) -> Any:
    """Its gradient is NaN at x = 0, where the loss is not."""
    loss, grad = jax.value_and_grad(lambda w: jnp.sqrt(jnp.abs(w * x)).sum())(w)
    return w - 0.1 * grad, loss


@pytest.mark.parametrize("every", [1, 3])
def test_a_bad_step_that_shows_at_a_later_call_leaves_that_call_its_own_batch(every: int) -> None:
    """The weight is NaN under a finite loss, which shows when a later call begins."""
    good, bad = jnp.array([1.0, 2.0, 3.0]), jnp.array([1.0, 0.0, 1.0])
    caught, w = catch(root_step, every=every, on_bad="report"), jnp.ones(3)
    for x in (good, bad):
        w, _ = caught(w, x)
    with pytest.warns(CatchWarning, match="step 1: argument") as told:
        w = reduce(lambda w, x: caught(w, x)[0], [good] * (2 if every == 3 else 1), w)
    assert ("\n  Steps 1 to 2 are left out." in str(told[0].message)) == (every == 3)
    assert bits(w) == bits(root_step(root_step(jnp.ones(3), good)[0], good)[0])


def test_a_complex_state_that_is_not_finite() -> None:
    def step(z: Any, x: Any) -> Any:
        z = z * lax.complex(x, x)
        return z, x.sum()

    caught = catch(jax.jit(step), every=10, on_bad="report")  # check() raises even so
    z, _ = caught(jnp.ones(3, jnp.complex64), jnp.full(3, 1e30))
    caught.check()
    z, _ = caught(z, jnp.full(3, 1e30))
    with pytest.raises(BadStepError, match=r"step 1: argument \[0\] is (Inf|NaN)") as raised:
        caught.check()
    assert raised.value.report.fault.op == "mul"


def test_a_bad_gradient_under_finite_losses_is_found_later_and_its_step_named() -> None:
    """A row of a table becomes NaN, and later steps read other rows: no loss shows it."""

    def loss_fn(table: Any, at: Any, x: Any) -> Any:
        return jnp.sqrt(jnp.abs(table[at] * x)).sum()  # at x = 0 its derivative is Inf times 0

    def step(table: Any, at: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(loss_fn)(table, at, x)
        return table - 0.1 * grad, loss

    def with_norm(table: Any, at: Any, x: Any) -> Any:
        grad = jax.grad(loss_fn)(table, at, x)
        return *step(table, at, x), jnp.linalg.norm(grad)

    def trained(step: Any, many: int) -> Any:
        table = jnp.ones((128, 2))
        for at in range(many):
            table, loss, *_ = step(table, at, jnp.array([1.0, 0.0 if at == 1 else 2.0]))
            assert jnp.isfinite(loss)
        return table

    caught = catch(jax.jit(step), every=4)
    assert jnp.isnan(trained(caught, 4)).sum() == 1
    caught = catch(jax.jit(step), every=4)
    with pytest.raises(BadStepError, match=r"^step 1: argument \[0\] is NaN after it\n") as raised:
        trained(caught, 100)
    assert caught.step == 4, "the weights are checked when the fifth call begins"
    report: Any = raised.value.report
    assert (report.undone, report.fault.op, report.fault.kind) == (3, "reciprocal", "operation")
    (good, *_), _ = raised.value.last_good
    assert bits(good) == bits(trained(jax.jit(step), 1))

    # What the step returns is checked at every call, and so is a norm that it returns.
    caught = catch(jax.jit(with_norm), every=1000)
    with pytest.raises(BadStepError, match=r"^step 1: the loss result\[2\] is NaN\n"):
        trained(caught, 100)


def test_flax_objects_are_put_back_in_place() -> None:
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: autocast(lambda m: m(x).mean())(m))(model)
        optimizer.update(model, grads)
        return loss

    caught = catch(step, every=2)
    for _ in range(3):
        caught(model, optimizer, jnp.ones((2, 3)))
    before = jax.tree.map(jnp.copy, nnx.state((model, optimizer)))
    with pytest.raises(BadStepError, match=r"^step 3: the loss is NaN") as raised:
        checked(caught, model, optimizer, jnp.full((2, 3), jnp.nan))
    assert bits(nnx.state((model, optimizer))) == bits(before)
    assert raised.value.report.fault is not None


@pytest.mark.parametrize("on_bad", ["raise", "report"])
@pytest.mark.parametrize("jitted", [True, False])
def test_references_are_put_back_in_place(jitted: bool, on_bad: Any) -> None:
    def step(w: jax.Ref, x: Any) -> Any:
        loss, grad = jax.value_and_grad(autocast(lambda w: jnp.mean((x @ w) ** 2)))(w[...])
        w[...] -= 0.1 * grad
        return loss

    caught = catch(jax.jit(step) if jitted else step, every=2, on_bad=on_bad)
    w = jax.new_ref(jnp.ones((8, 2)))
    for factor in (1.0, 2.0, 3.0):
        checked(caught, w, X * np.float32(factor))
    before = bits(w[...])
    if on_bad == "report":
        with pytest.warns(CatchWarning, match=r"^step 3: the loss is NaN"):
            [caught(w, X * np.float32(x)) for x in ("nan", 1.0)]  # the last on the state before
        again = jax.new_ref(jnp.ones((8, 2)))
        for factor in (1.0, 2.0, 3.0, 1.0):
            jax.jit(step)(again, X * np.float32(factor))
        assert bits(w[...]) == bits(again[...])
        return
    with pytest.raises(BadStepError, match=r"^step 3: the loss is NaN") as raised:
        checked(caught, w, X * np.float32("nan"))
    assert bits(w[...]) == before
    assert raised.value.report.fault is not None
    assert raised.value.last_good[0][0] is w


def test_a_reference_that_is_not_finite_after_a_step() -> None:
    """The best losses start at Inf; that is no fault, also of one that stays so."""

    @jax.jit
    def step(w: jax.Ref, best: jax.Ref, x: Any) -> Any:
        w[...] *= x
        best[0] = jnp.minimum(best[0], w[...].sum())
        return jnp.float32(1.0)

    caught, w, best = catch(step), jax.new_ref(jnp.ones(3)), jax.new_ref(jnp.full(2, jnp.inf))
    with pytest.raises(BadStepError, match=r"^step 2: argument \[0\] is NaN after it"):
        [checked(caught, w, best, x) for x in (1.0, 2.0, math.nan, 1.0)]
    assert (w[0], best[0], best[1]) == (2.0, 3.0, math.inf)


def test_a_state_that_other_code_changes_is_in_the_next_copy() -> None:
    step, state = catch(train_step("bfloat16", True), every=100), start()
    for _ in range(3):
        *state, _ = step(*state, X)
    state[0] = jax.tree.map(lambda w: w * 2, state[0])
    expected = jax.tree.map(jnp.copy, state)
    with pytest.raises(BadStepError) as raised:
        checked(step, *state, X * np.float32(math.nan))
    (*last_good, _), _ = raised.value.last_good
    assert bits(last_good) == bits(expected)


def test_a_batch_that_is_donated_is_told() -> None:
    step = catch(jax.jit(lambda w, x: (w + x, (w * x).sum()), donate_argnums=(1,)))
    w = jnp.ones(3)
    for _ in range(2):
        w, _ = step(w, jnp.ones(3))
    with pytest.raises(BadStepError, match="Donate what it returns alone") as raised:
        checked(step, w, jnp.full(3, jnp.nan))
    assert raised.value.last_good is None


@pytest.mark.parametrize("default", [(1.0,), ()], ids=["goes on", "has ended"])
def test_a_step_that_reads_its_batch_itself_is_told(default: tuple[float, ...]) -> None:
    batches = iter([1.0, 1.0, math.nan])
    inner = jax.jit(lambda w, x: (w + x, (w * x).sum()))
    step, w = catch(lambda w: inner(w, next(batches, *default))), jnp.ones(3)
    with pytest.raises(BadStepError, match="Repeating the steps did not give that") as raised:
        [w := checked(step, w)[0] for _ in range(3)]
    report = raised.value.report
    assert (report.step, report.found) == (2, "the loss is NaN")
    assert report.remedy == ""  # it is not known that the learning rate is too large
    assert str(raised.value).endswith("Give the step all that it reads as arguments.")


def test_a_step_that_reads_values_is_stopped_without_an_op() -> None:
    def step(w: Any, x: Any) -> Any:
        loss = jnp.log(w * x).sum()
        return (w + 1 if float(loss) > 0 else w), loss

    caught = catch(step)
    w, _ = caught(jnp.ones(2), jnp.ones(2))
    with pytest.raises(BadStepError, match="Return the loss as an array") as raised:
        checked(caught, w, -jnp.ones(2))
    assert raised.value.report.found == "the loss is NaN"


def test_an_nnx_model_with_dropout_in_a_closure() -> None:
    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    step = catch(lambda x: jnp.log(model(x)).sum() * 0 + x.sum())
    with pytest.raises(BadStepError, match="Give it the model and the optimizer as arguments"):
        checked(step, jnp.full((1, 2), jnp.nan))


def test_it_is_not_called_in_traced_code() -> None:
    with pytest.raises(TypeError) as raised:
        jax.jit(catch(lambda w: w))(1.0)
    assert str(raised.value) == (
        "the step of catch was called by code that is traced, where there are no values. "
        "Write catch(jax.jit(step)), and call it outside of jit."
    )


def test_of_several_numbers_the_one_that_broke_is_shown() -> None:
    @catch
    @jax.jit
    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x * w) ** 2))(w)
        return w - 10 * grad, {"accuracy": jnp.float32(0.5), "loss": loss}

    w = jnp.ones(2)
    for number in (0.1, 0.2, 0.3):
        w, _ = step(w, jnp.full(2, number))
    with pytest.raises(BadStepError) as raised:
        checked(step, w, jnp.full(2, math.nan))
    report = raised.value.report
    assert report.found == "the loss result[1]['loss'] is NaN"
    assert report.losses == pytest.approx([0.01, 0.0324, 0.026244])
    with pytest.raises(BadStepError) as raised:  # the state breaks
        checked(step, jnp.ones(2), jnp.full(2, 1.2e19))
    assert raised.value.report.losses == ()


def test_a_step_without_a_loss_is_told() -> None:
    step = catch(jax.jit(lambda w, x: w - 0.1 * x.sum()))
    with pytest.warns(CatchWarning, match=r"the step returns no loss.* Return the loss\."):
        w = step(jnp.ones(3), jnp.ones(2))
    step(w, jnp.ones(2))
    caught = catch(jax.jit(lambda w, x: (w - 0.1, x.sum())))
    caught(jnp.ones(3), jnp.ones(2))  # no warning


def test_what_has_a_dtype_and_is_no_array_is_not_checked() -> None:
    shape = jax.ShapeDtypeStruct((1,), jnp.float32)
    others = jnp.float32, np.float32, shape, jax.new_ref(jnp.zeros(1))
    step = catch(lambda w, others: ((w - 0.1).astype(others[0]), others, w.sum()), every=1)
    w = jnp.ones(3)
    for _ in range(3):
        w, others, _ = step(w, others)
    with pytest.raises(BadStepError, match="step 3: the loss is NaN"):
        checked(step, w * math.nan, others)


def test_a_buffer_that_is_filled_again_for_each_batch() -> None:
    buffer = np.zeros((4, 8), np.float32)

    @partial(catch, every=5)
    @jax.jit
    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    w = jnp.full(8, 0.1)
    for _ in range(7):
        buffer[:] = 1
        w, _ = step(w, buffer)
    buffer[:] = math.nan
    with pytest.raises(BadStepError) as raised:
        _ = step(w, buffer), step.check()
    fault = raised.value.report.fault
    assert (raised.value.report.step, fault.kind, fault.why[:1]) == (7, "input", "x")
    assert step.__name__ == "step"


def test_a_loss_as_a_number_of_a_step_whose_state_is_elsewhere() -> None:
    """Repeating it goes on from where the state is now: its losses then say which step was bad."""
    state = {"w": jnp.full(8, 0.1)}

    @partial(catch, every=5)
    def step(x: Any) -> float:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        state["w"] = state["w"] - 0.1 * grad
        return float(loss)

    for _ in range(7):
        step(jnp.ones((4, 8)))
    with pytest.raises(BadStepError, match="reads its batch itself, or other code") as raised:
        _ = step(jnp.full((4, 8), math.nan)), step.check()
    assert (raised.value.report.step, raised.value.report.found) == (7, "the loss is NaN")
