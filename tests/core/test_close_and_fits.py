"""`assert_close` and `assert_fits`: what they notice, in each framework, and what they refuse."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import polymp
from polymp.testing import ParityError, assert_close, assert_fits
from tests.conftest import need
from tests.support.regions import audited, region

X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)


def gelu(fw: Any, exact: bool = True) -> Any:
    if fw.name == "torch":
        import torch

        how = "none" if exact else "tanh"
        return lambda x: torch.nn.functional.gelu(x, approximate=how)
    import jax

    return lambda x: jax.nn.gelu(x, approximate=not exact)


# --- assert_close ---------------------------------------------------------------------------------


def test_a_function_is_close_to_itself_in_a_low_dtype_and_the_tolerance_is_wider(fw: Any) -> None:
    inputs = [fw.array(X), fw.array(W)]

    def fn(x: Any, w: Any) -> Any:
        return fw.xp.tanh(x @ w) @ w

    wide = assert_close(fn, fn, *inputs)
    assert [gap.error for gap in wide.gaps] == [0.0] * 3
    low = assert_close(fn, fn, *inputs, dtype="bf16")
    graded = [f"gradient of input[{i}]" for i in (0, 1)]
    assert [gap.what for gap in low.gaps] == ["result", *graded]
    for one, other in zip(wide.gaps, low.gaps, strict=True):
        assert other.error > one.tolerance, "bfloat16 shows"
        assert 1000 * one.tolerance < other.tolerance < 0.2


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_error_of_three_times_the_tolerance_fails(fw: Any, dtype: str | None) -> None:
    inputs = [fw.array(X), fw.array(W)]

    def fn(x: Any, w: Any) -> Any:
        return fw.xp.tanh(x @ w)

    def compared(off: float) -> Any:
        return assert_close(lambda *a: fn(*a) + off, fn, *inputs, dtype=dtype, grads=False)

    tolerance = compared(0.0).gaps[0].tolerance
    compared(0.3 * tolerance)
    with pytest.raises(ParityError, match="result: off by") as caught:
        compared(3.0 * tolerance)
    assert caught.value.dtype == (dtype or "float32")
    assert str(caught.value).startswith(f"in {dtype}: " if dtype else "the two functions")


def test_the_first_op_that_differs_is_named(fw: Any) -> None:
    def with_gelu(exact: bool) -> Any:
        return lambda x, w: fw.xp.tanh(gelu(fw, exact)(fw.xp.exp(x) @ w))

    with pytest.raises(ParityError) as caught:
        assert_close(with_gelu(False), with_gelu(True), fw.array(X), fw.array(W))
    error = caught.value
    assert error.op == {"torch": "gelu", "jax": "pow"}[fw.name], "in JAX, of the gelu by tanh"
    assert error.side_by_side.splitlines()[0].split() == ["fn", "reference"]
    assert error.gaps[0].part


def test_the_op_is_named_though_its_gradient_is_right(fw: Any) -> None:
    with pytest.raises(ParityError) as caught:
        assert_close(fw.xp.exp, fw.xp.expm1, fw.array(X))
    assert caught.value.op == "exp"
    assert [found.part for found in caught.value.gaps] == [True, False]
    with pytest.raises(ParityError, match="other values"):  # which no op on floats made
        assert_close(fw.xp.argmax, fw.xp.argmin, fw.array(X))


def test_a_wrong_gradient_fails_though_the_result_is_right(fw: Any) -> None:
    def stopped(x: Any, w: Any) -> Any:
        if fw.name == "torch":
            return x @ w.detach()
        import jax

        return x @ jax.lax.stop_gradient(w)

    inputs = [fw.array(X), fw.array(W)]
    with pytest.raises(ParityError, match=r"gradient of input\[1\]: off by"):
        assert_close(stopped, lambda x, w: x @ w, *inputs)
    assert_close(stopped, lambda x, w: x @ w, *inputs, grads=False)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_gradients_are_compared_by_a_caller_who_records_none(torch: Any, mode: str) -> None:
    x = torch.tensor(X)
    with getattr(torch, mode)():
        assert_close(torch.sin, torch.sin, x)
        with pytest.raises(ParityError, match=r"gradient of input\[0\]: off by"):
            assert_close(torch.sin, lambda x: x.sin() + x - x.detach(), x)
        assert not torch.is_grad_enabled()


def test_a_result_that_is_a_buffer_is_that_of_the_call(torch: Any) -> None:
    """And not what is put back afterwards."""

    def normed(momentum: float) -> Any:
        norm = torch.nn.BatchNorm1d(8, momentum=momentum)
        return lambda x: (norm(x), norm.running_mean)[1]

    x = torch.tensor(X)
    assert_close(normed(0.1), normed(0.1), x)
    with pytest.raises(ParityError, match="result: off by"):
        assert_close(normed(0.2), normed(0.1), x)


def test_numbers_and_numpy_arrays_that_are_returned_are_compared(fw: Any) -> None:
    x = fw.array(X)
    for wrong in (3.5, 4, np.full(2, 3.5)):
        with pytest.raises(ParityError, match=r"result\[1\]: off by"):
            assert_close(lambda x, wrong=wrong: (x, wrong), lambda x, w=wrong: (x, w - 1), x)
        assert_close(lambda x, right=wrong: (x, right), lambda x, right=wrong: (x, right), x)
    with pytest.raises(TypeError, match="function returns nothing to compare: return arrays"):
        assert_close(lambda x: None, lambda x: None, x)


def test_a_number_that_is_read_off_a_tensor_may_be_off_by_rounding(torch: Any) -> None:
    x = torch.tensor(X)
    assert_close(lambda x: x.sum(0).sum().item(), lambda x: x.sum().item(), x)
    with pytest.raises(ParityError, match="result: off by"):
        assert_close(lambda x: x.sum().item() + 0.01, lambda x: x.sum().item(), x)


def test_the_error_of_infinities_says_so(fw: Any) -> None:
    x = fw.array(np.array([1.0, 1e30], "float32"))
    said = r"\n  result: not equal where one of the two, or a probe, is Inf or NaN$"
    with pytest.raises(ParityError, match=said):
        assert_close(lambda x: x * x, lambda x: x * 2, x, grads=False)
    assert_close(lambda x: x * x, lambda x: x * x, x, grads=False)


def test_the_error_of_integers_is_how_far_they_are_off(fw: Any) -> None:
    x = fw.array(np.arange(4), "int")
    said = r"result: off by 2 > tolerance 0, relative to the largest magnitude, 3$"
    with pytest.raises(ParityError, match=said):
        assert_close(lambda x: x, lambda x: x + 6, x, grads=False)
    with pytest.raises(ParityError, match=r"result: off by 1 > tolerance 0, .* magnitude, 1$"):
        assert_close(lambda x: x > 0, lambda x: x > 1, x, grads=False)


def test_random_numbers_are_the_same_in_all_runs(torch: Any) -> None:
    """Else masks of dropout would pass for rounding, and fill the tolerance."""
    drop, x = torch.nn.Dropout(), torch.tensor(X)
    before = torch.get_rng_state()
    assert_close(drop, drop, x)
    with pytest.raises(ParityError, match="result: off by"):
        assert_close(drop, lambda x: drop(x) * 2, x)
    assert torch.equal(torch.get_rng_state(), before)


def test_compiled_code_is_compared_as_it_is_compiled(torch: Any) -> None:
    """And not as it is written, as it runs while a tracer follows."""

    def fn(x: Any) -> Any:
        return x.exp() * (1.001 if torch.compiler.is_compiling() else 1)

    compiled = torch.compile(fn, backend="aot_eager")
    with pytest.raises(ParityError, match=r"result: off by 0\.000999"):
        assert_close(compiled, fn, torch.tensor(X))
    assert_close(compiled, compiled, torch.tensor(X))


def test_arrays_of_every_kind_are_inputs(fw: Any) -> None:
    low = fw.array(X, "bfloat16")

    def fn(tree: Any, at: Any, scale: float) -> Any:
        return {"rows": tree["x"][at] * scale, "at": at + 1}

    found = assert_close(fn, fn, {"x": low}, np.array([2, 0]), 2.0, framework=fw.name)
    assert found.dtypes == {"['at']": "int", "['rows']": "bfloat16"}
    assert assert_close(fn, fn, {"x": X}, fw.array([2, 0], "int"), 2.0).gaps
    with pytest.raises(ParityError, match=r"result\['at'\]: off by"):
        assert_close(lambda *a: {**fn(*a), "at": a[1]}, fn, {"x": low}, np.array([2, 0]), 2.0)
    with pytest.raises(ParityError, match=r"other structures: result in fn, result\[0\]"):
        assert_close(lambda x: x, lambda x: (x, x), low)
    with pytest.warns(UserWarning, match="assert_close compared no gradients"):
        assert_close(lambda x: x + 1, lambda x: x + 1, fw.array([2, 0], "int"))


def test_integers_keep_their_dtype_and_keys_of_random_numbers_are_inputs() -> None:
    need("jax")
    import jax

    def dropped(key: Any, x: Any) -> Any:
        return jax.numpy.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)

    key, x = jax.random.key(7), jax.numpy.asarray(X)
    for each in (key, jax.random.split(jax.random.PRNGKey(7))[0]):
        assert_close(dropped, dropped, each, x)
        with pytest.raises(ParityError, match="result: off by"):
            assert_close(dropped, lambda key, x: 2 * dropped(key, x), each, x)
    with pytest.warns(UserWarning, match="compared no gradients"):
        assert_close(jax.random.bits, jax.random.bits, key)


def test_integers_of_64_bits_and_tensors_that_numpy_lacks(torch: Any) -> None:
    hashes = torch.tensor([2**40 + 1])
    assert_close(lambda i: i % 2, lambda i: i % 2, hashes, grads=False)
    for x in (torch.ones(2).to_sparse(), torch.ones(2).to(torch.float8_e4m3fn)):
        with pytest.raises(TypeError, match=r"input \[0\], of torch\.float.*, cannot be compared"):
            assert_close(torch.abs, torch.abs, x)


def test_the_reference_is_in_float32_and_the_function_in_a_region(fw: Any) -> None:
    seen: dict[str, set[tuple[str, str]]] = {"fn": set(), "reference": set()}

    def noted(name: str) -> Any:
        def fn(x: Any, w: Any) -> Any:
            y = x @ w
            seen[name].add((fw.dtype(x), fw.dtype(y)))
            return y

        return fn

    x, w = fw.array(X, "float16"), fw.array(W)
    found = assert_close(noted("fn"), noted("reference"), x, w, dtype="float16")
    assert seen["reference"] == {("float32", "float32")}
    if fw.name == "torch":  # a function in JAX is traced as without a region
        assert seen["fn"] == {("float16", "float16")}
        assert found.dtypes == {"": "float16"}
    assert found.gaps[0].tolerance > 1e-4


def test_bad_arguments_of_assert_close() -> None:
    need("torch", "jax")
    import jax
    import torch

    exp, x = torch.exp, torch.ones(2)
    for error, message, args, options in (
        (TypeError, r'^assert_close\(\) finds no tensor.*="torch"', (np.exp, np.exp, X), {}),
        (ValueError, "no backend 'tf'", (exp, exp, X), {"framework": "tf"}),
        (TypeError, r"^assert_close: reference is no function: 3\.", (exp, 3, x), {}),
        (ValueError, r"^assert_close\(\): probes=1 is too few", (exp, exp, x), {"probes": 1}),
        (ValueError, r"^assert_close\(\): dtype 'fp17'", (exp, exp, x), {"dtype": "fp17"}),
        (polymp.PolicyError, "nonsense", (exp, exp, x), {"policy": "nonsense"}),
        (TypeError, r"Tanh\. .* as a module or a dtype, write lambda x: fn\(x, it\)\.$",
         (exp, exp, torch.nn.Tanh()), {}),
        (TypeError, r"got one of torch and one of jax\. assert_parity compares",
         (torch.nn.GELU(), jax.jit(jax.nn.gelu), x), {}),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            assert_close(*args, **options)


# --- assert_fits ----------------------------------------------------------------------------------


def large(x: Any) -> Any:
    return (x * 300) @ (x * 300).T


def small(x: Any) -> Any:
    return (x * 1e-5) @ (x * 1e-5).T + 1


@pytest.mark.parametrize(("fn", "words"), [(large, "are Inf in float16"), (small, "are zero in")])
def test_what_overflows_or_vanishes_does_not_fit_and_the_error_is_that_of_the_audit(
    fw: Any, fn: Any, words: str
) -> None:
    x = fw.array(X)
    with pytest.raises(AssertionError, match=words) as caught:
        assert_fits(fn, x, dtype="float16", policy="amp")
    text, audit = str(caught.value), audited(fw.name, region(fw.name, "float16", "amp")(fn), x)
    assert text.startswith(f"{fn.__name__} does not fit float16 under policy amp:\n")
    assert str(audit.suggest()) in text
    assert "audit of 1 step" in text
    assert assert_fits(fn, x, dtype="bfloat16").steps == 1
    own: Any = region(fw.name, "bfloat16", "amp")(fn)  # which wins over that of the assertion
    for check, functions in ((assert_fits, [own]), (assert_close, [own, fn])):
        with pytest.raises(ValueError, match=r"^the function has a region of its own in bfloat16"):
            check(*functions, x, dtype="float16")
    mine = audit.suggest().apply("amp")
    assert assert_fits(fn, x, dtype="float16", policy=mine).fault is None


def test_without_a_policy_the_region_has_that_of_a_region_without_one(fw: Any) -> None:
    """torch's own table for CPUs computes powers in the low dtype; amp, JAX's default, does not."""

    def power(x: Any) -> Any:
        return (x @ x.T * 0 + 300) ** 2

    x = fw.array(X)
    for policy in ("amp", None) if fw.name == "jax" else ("amp",):
        assert_fits(power, x, dtype="float16", policy=policy)
        assert_close(power, power, x, dtype="float16", policy=policy)
    if fw.name == "torch":
        with pytest.raises(AssertionError, match="does not fit float16 under policy torch-cpu"):
            assert_fits(power, x, dtype="float16")
        with pytest.raises(ParityError):
            assert_close(power, power, x, dtype="float16")


def test_the_infinities_of_a_mask_fit_and_those_of_the_data_do_not(fw: Any) -> None:
    def masked(x: Any) -> Any:
        return fw.xp.exp(fw.xp.where(x > 0, x, -float("inf")))

    assert_fits(masked, fw.array(X), dtype="float16")
    with pytest.raises(AssertionError, match="does not fit bfloat16"):
        assert_fits(lambda x: x @ x.T, fw.array([[1.0, float("inf")]]))


def test_a_gradient_that_vanishes_does_not_fit(fw: Any) -> None:
    def step(x: Any) -> Any:
        return fw.grad(lambda x: fw.xp.exp(fw.xp.tanh(x @ x.T)).mean() * 1e-7, x)[1]

    with pytest.raises(AssertionError, match="Start with a loss scale of"):
        assert_fits(step, fw.array(X), dtype="float16")
    assert_fits(step, fw.array(X), dtype="bfloat16")


def test_a_module_is_called_by_its_paths_and_a_policy_may_have_rows_for_them() -> None:
    need("torch")
    from torch import nn, tensor

    class Large(nn.Module):
        def forward(self, x: Any) -> Any:
            return large(x)

    model = nn.Sequential(nn.Identity(), Large())
    with pytest.raises(AssertionError, match=r"\[scopes\.\"1\"\]") as caught:
        assert_fits(model, tensor(X), dtype="float16")
    assert str(caught.value).startswith("Sequential does not fit float16 under policy torch-cpu")
    policy = {"extends": "amp", "scopes": {"1": {"matmul": "fp32"}}}
    assert_fits(model, tensor(X), dtype="float16", policy=policy)


def test_a_call_without_floats_does_not_fit_unseen(fw: Any) -> None:
    with pytest.raises(ValueError, match="assert_fits measured nothing: no op on floats ran"):
        assert_fits(lambda x: x + 1, fw.array([1, 2], "int"))


def test_arguments_that_a_step_donates_are_the_callers_still() -> None:
    need("jax")
    import jax

    @partial(jax.jit, donate_argnums=0)
    def step(params: Any, key: Any) -> Any:
        return {"w": params["w"] * 0.5 + jax.random.normal(key, (8, 8))}

    params, key = {"w": jax.numpy.asarray(W)}, jax.random.key(0)
    assert_fits(step, params, key)
    assert (params["w"] == W).all()


def test_bad_arguments_of_assert_fits() -> None:
    need("torch")
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"^assert_fits needs a function or a module, got 3\."):
        assert_fits(3, X)
    with pytest.raises(TypeError, match=r"^assert_fits needs .* got tensor\(\[\[.{60,80}\.$"):
        assert_fits(torch.tensor(X), large)
    with pytest.raises(TypeError, match=r"^assert_fits\(\) finds no tensor"):
        assert_fits(large, X)
    with pytest.raises(ValueError, match=r"^assert_fits\(\): dtype 'float32'"):
        assert_fits(large, X, dtype="float32", framework="torch")


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_complex_numbers_are_rounded_too(framework: str) -> None:
    np = pytest.importorskip("numpy")
    places = np.arange(8)
    dft = np.exp(-2j * np.pi * np.outer(places, places) / 8).astype(np.complex64)
    xp = pytest.importorskip("torch" if framework == "torch" else "jax.numpy")
    x, dft = (xp.asarray(each) for each in (np.linspace(-1, 2, 32, dtype="f4").reshape(4, 8), dft))
    for last in (abs, lambda z: z):
        assert_close(lambda x, f=last: f(xp.fft.fft(x)), lambda x, f=last: f((x + 0j) @ dft), x)
    with pytest.raises(ParityError):
        assert_close(lambda x: 1.0001 * abs(xp.fft.fft(x)), lambda x: abs((x + 0j) @ dft), x)
    still = x.detach() if framework == "torch" else x + 0  # no part of what is differentiated
    with pytest.raises(ParityError, match=r"gradient of input\[0\]: off by"):
        assert_close(lambda x: xp.fft.fft(2 * x - still), lambda x: xp.fft.fft(x), x)


def test_running_means_are_put_back() -> None:
    """Their kernel writes them without a new version. So are arguments that a module writes."""
    torch = pytest.importorskip("torch")
    norm, x = torch.nn.BatchNorm1d(4), 1 + torch.randn(8, 4)
    model, before = torch.nn.Sequential(torch.nn.ReLU(inplace=True), norm), x.clone()
    norm.register_buffer("mask", torch.full((4,), -torch.inf))  # whose copy is no op of the model
    assert_close(model, lambda x: norm(x.relu()), x)
    with pytest.raises(ParityError, match="The first op that differs is relu"):
        assert_close(model, norm, x)
    assert_fits(model, x)
    assert x.equal(before)
    assert norm.running_mean.eq(0).all()
    assert norm.running_var.eq(1).all()
    assert norm.num_batches_tracked == 0


def test_a_training_step_is_put_back_too() -> None:
    """So that all runs start from the same weights, and none trains."""
    torch = pytest.importorskip("torch")
    model, x = torch.nn.Linear(8, 2), torch.tensor(X)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def step(x: Any, factor: float = 1.0) -> Any:
        loss = factor * model(x).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach()

    assert_close(step, step, x, grads=False)
    with pytest.raises(ParityError):
        assert_close(step, lambda x: step(x, 1.001), x, grads=False)
    assert_fits(step, x)

    def attached(x: Any) -> Any:
        (loss := model(x).square().mean()).backward()
        return loss

    with pytest.raises(RuntimeError, match="as a training step does: write grads=False"):
        assert_close(attached, attached, x)
    assert all(before[k].equal(v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert (optimizer.state, optimizer.param_groups[0]["lr"]) == ({}, 0.1)
    assert schedule.last_epoch == 0


def test_what_an_nnx_model_counts_and_draws_is_the_same_in_every_run_and_put_back() -> None:
    need("jax")
    import jax
    from flax import nnx

    class Net(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.norm, self.drop = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.drop(self.norm(x))

    net, x = Net(nnx.Rngs(0)), jax.numpy.asarray(X)
    before = jax.tree.map(jax.numpy.array, nnx.to_pure_dict(nnx.state(net)))
    assert_close(net, net, x, dtype="bfloat16")
    assert_close(net.__call__, net, x)
    assert_fits(net, x, dtype="float16")
    assert_fits(lambda net, x: net(x), net, x)
    after = nnx.to_pure_dict(nnx.state(net))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), before, after))
    with pytest.raises(ParityError):
        assert_close(net, net.norm, x)


def test_buffers_that_nothing_writes_may_be_views_and_of_inference() -> None:
    torch = pytest.importorskip("torch")

    class Scaled(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ones", torch.ones(1).expand(4))

        def forward(self, x: Any) -> Any:
            return self.ones * x

    with torch.inference_mode():
        norm = torch.nn.BatchNorm1d(4, affine=False).eval()
    model = torch.nn.Sequential(Scaled(), norm)
    assert_close(model, model, torch.ones(3, 4), grads=False)


def test_a_norm_in_a_low_dtype_is_not_allowed_more_than_its_rounding() -> None:
    torch = pytest.importorskip("torch")

    def norm(x: Any, w: Any, b: Any) -> Any:
        return torch.nn.functional.layer_norm(x.bfloat16(), [64], w, b)

    x = 5 + torch.randn(8, 64)
    w, b = torch.ones(64).bfloat16(), torch.zeros(64).bfloat16()
    assert_close(lambda x: norm(x, w, b), lambda x: norm(x, w, b), x)
    with pytest.raises(ParityError):
        assert_close(lambda x: 1.1 * norm(x, w, b), lambda x: norm(x, w, b), x)
