"""Ops that add up are arithmetic, and a product that adds nothing up is no matrix product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polymp
from tests.conftest import FRAMEWORKS, need
from tests.support import frameworks
from tests.support.regions import region

N = 4096
FP32 = polymp.policy({"name": "all in float32", "rules": {"all": "fp32"}})
OWN = polymp.policy({"name": "of one row", "rules": {"linear": "fp32"}})


def in_region(framework: str, fn: Any, policy: Any) -> Any:
    """A function in a bfloat16 region of a policy."""
    return region(framework, "bfloat16", policy)(fn)


def scatters(framework: str) -> dict[str, Any]:
    """Functions of a zero and N numbers, by name, that add the numbers up in the zero's place."""
    if framework == "torch":
        import torch

        at = torch.zeros(N, dtype=torch.long)
        return {
            "index_add": lambda zero, x: zero.index_add(0, at, x),
            "index_put": lambda zero, x: zero.index_put((at,), x, accumulate=True),
            "put": lambda zero, x: zero.put(at, x, accumulate=True),
            "scatter_add": lambda zero, x: zero.scatter_add(0, at, x),
            "scatter_reduce": lambda zero, x: zero.scatter_reduce(0, at, x, "sum"),
            "segment_reduce": lambda zero, x: torch.segment_reduce(x, "sum", lengths=at[:1] + N),
        }
    import jax

    at = np.zeros(N, int)
    return {
        "add": lambda zero, x: zero.at[at].add(x),
        "subtract": lambda zero, x: -zero.at[at].subtract(x),
        "segment_sum": lambda zero, x: jax.ops.segment_sum(x, at, 1),
    }


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("policy", [FP32, "matmul"], ids=str)
def test_summing_scatters_are_arithmetic(framework: str, policy: Any) -> None:
    """In bfloat16 the sum of 4,096 times 0.01 ends at 4."""
    need(framework)
    fw: Any = frameworks.load(framework)
    zero, numbers = fw.array([0.0], "bfloat16"), fw.array([0.01] * N, "bfloat16")
    found = {
        name: in_region(framework, fn, policy)(zero, numbers)
        for name, fn in scatters(framework).items()
    }
    assert {name: fw.dtype(x) for name, x in found.items()} == dict.fromkeys(found, "float32")
    for name, x in found.items():
        assert float(fw.numbers(x)[0]) == pytest.approx(41.0, rel=0.01), name


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter:UserWarning")
def test_what_sums_into_a_low_tensor_is_rounded_once(torch: Any) -> None:
    """In place, and by the rows of amp for ops that return the dtype of what they write into."""
    at = torch.zeros(N, dtype=torch.long)
    sums = {
        "index_add_": lambda zero, x: zero.index_add_(0, at, x),
        "index_put_": lambda zero, x: zero.index_put_((at,), x, accumulate=True),
        "index_reduce_": lambda zero, x: zero.index_reduce_(0, at, x, "mean"),
        "put_": lambda zero, x: zero.put_(at, x, accumulate=True),
        "scatter_.reduce": lambda zero, x: zero.scatter_(0, at, x, reduce="add"),
        "scatter_add_": lambda zero, x: zero.scatter_add_(0, at, x),
        "scatter_reduce_": lambda zero, x: zero.scatter_reduce_(0, at, x, "sum"),
    }
    out = {  # which have no gradients
        "index_add": lambda zero, x: torch.index_add(zero, 0, at, x.data, out=zero),
        "index_reduce": lambda zero, x: torch.index_reduce(zero, 0, at, x.data, "mean", out=zero),
        "scatter_add": lambda zero, x: torch.scatter_add(zero, 0, at, x.data, out=zero),
    }
    sums |= {f"{name}(out=)": fn for name, fn in out.items()}
    every = scatters("torch")
    of_amp = {name: every[name] for name in ("index_add", "index_put", "put", "segment_reduce")}
    moves = {
        "index_put_": lambda zero, x: zero.index_put_((at[:1],), x[:1]),
        "b[mask] = x": lambda zero, x: zero.__setitem__(zero == 0, x[:1]) or zero,
        "put_": lambda zero, x: zero.put_(at[:1], x[:1]),
    }
    for policy in (FP32, "matmul", "amp", "lean", None, OWN, "torch-cpu", "torch-cuda"):
        ours = policy in (FP32, "matmul", "amp", "lean")
        for name, fn in (sums | (of_amp if policy not in (FP32, "matmul") else {})).items():
            zero = torch.zeros(1, dtype=torch.bfloat16)
            x = torch.full((N,), 0.01, dtype=torch.bfloat16, requires_grad=ours)
            with region("torch", "bfloat16", policy):
                result = fn(zero, x)
            case = f"{name} under {policy}"
            assert result.dtype is torch.bfloat16, case
            if ours:
                mean = "index_reduce" in name
                assert float(result.detach()) == pytest.approx(0.01 if mean else 41.0, 0.01), case
                assert (result is zero) == (name in sums), case
                if "out=" not in name and name != "scatter_.reduce":  # nor has this in torch
                    result.sum().backward()
                    assert torch.equal(x.grad, torch.full_like(x, 1 / N if mean else 1.0)), case
            else:
                assert torch.equal(result, fn(torch.zeros(1, dtype=torch.bfloat16), x)), case
        for name, fn in moves.items():
            zero, x = torch.zeros(1).bfloat16(), torch.full((1,), 0.01).bfloat16()
            with region("torch", "bfloat16", policy):
                assert fn(zero, x) is zero, name
            assert torch.equal(zero, x), f"{name} under {policy}"


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
def test_out_of_a_sum_is_resized_and_refused_as_torch_does(torch: Any) -> None:
    at = torch.zeros(N, dtype=torch.long)
    zero, x = torch.zeros(1).bfloat16(), torch.full((N,), 0.01).bfloat16()
    with region("torch", "bfloat16", FP32):
        for size in (0, 1, 3):
            out = torch.zeros(size).bfloat16()
            assert torch.index_add(zero, 0, at, x, out=out) is out
            assert out.tolist() == [41.0]
        for numbers, out in ((x, torch.zeros(1)), (x.float(), torch.zeros(1).bfloat16())):
            with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
                torch.index_add(zero.to(numbers.dtype), 0, at, numbers, out=out)
        weight = torch.nn.Parameter(torch.ones(1, 1))
        low = torch.nn.functional.linear(torch.ones(1, 1), weight)
        with torch.no_grad():
            torch.index_add(weight, 0, at[:1], torch.ones(1, 1), out=weight)
        assert torch.equal(torch.nn.functional.linear(torch.ones(1, 1), weight), 2 * low)


POSITIONS = np.arange(4096.0)
RATES = 10000 ** -(np.arange(0, 64, 2) / 64)

MULTIPLIES = {  # as torch and jax.numpy spell it, of positions and rates
    "einsum": lambda xp, p, r: xp.einsum("n,d->nd", p, r),
    "einsum of one term": lambda xp, p, r: xp.einsum("i , j", p, r),
    "einsum of any number of dimensions": lambda xp, p, r: xp.einsum("..., f -> ... f", p, r),
    "einsum without a sum": lambda xp, p, r: xp.einsum("nd,d->nd", xp.stack([p] * 32, 1), r),
    "@": lambda xp, p, r: p[:, None] @ r[None],
    "matmul in a batch": lambda xp, p, r: xp.matmul(p[None, :, None], r[None, None])[0],
    "tensordot": lambda xp, p, r: xp.tensordot(p, r, 0),
    "outer": lambda xp, p, r: xp.outer(p, r),
    "kron": lambda xp, p, r: xp.kron(p[:, None], r[None]),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("policy", ["amp", "lean", "matmul"])
def test_a_product_that_sums_over_nothing_is_not_lowered(framework: str, policy: str) -> None:
    """Rotary angles: in bfloat16 they are wrong by up to 14."""
    need(framework)
    fw: Any = frameworks.load(framework)
    xp = __import__("torch") if framework == "torch" else __import__("jax.numpy").numpy
    arrays = fw.array(POSITIONS, "float32"), fw.array(RATES, "float32")
    exact = np.outer(POSITIONS, RATES)
    for name, fn in MULTIPLIES.items():
        angles = in_region(framework, lambda p, r, fn=fn: fn(xp, p, r), policy)(*arrays)
        np.testing.assert_allclose(fw.numbers(angles), exact, rtol=1e-6, err_msg=name)
    summed = in_region(framework, lambda p, r: xp.einsum("nd,nd->n", p, r), policy)
    assert fw.dtype(summed(*(fw.array(np.ones((2, 2)), "float32"),) * 2)) == "bfloat16"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_products_that_are_like_no_other_run_as_without_a_region(torch: Any) -> None:
    """Of numbers, of a dimension that is repeated, and wrong ones, with torch's own errors."""
    number, x, y = torch.tensor(2.0), torch.rand(2, 3), torch.rand(1, 4)
    nested = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)])
    calls = {
        "inner of a number": (lambda: torch.inner(number, x), "float32"),
        "inner with a number": (lambda: torch.inner(x, number), "float32"),
        "a dimension of 1 that is repeated": (lambda: torch.einsum("ij,jk", x, y), "bfloat16"),
        "dots that are summed": (lambda: torch.einsum("...,b...->b", x[0], x), "bfloat16"),
        "dots that stay": (lambda: torch.einsum("i...,i...->...", x[:1], y[:, :3]), "float32"),
        "matmul of a number": (lambda: torch.matmul(number, x), "at least 1D"),
        "too few": (lambda: torch.einsum("ij,jk->ik", x), "fewer operands"),
        "too many": (lambda: torch.einsum("ij->ji", x, x), "more operands"),
        "nested": (lambda: torch.matmul(nested, x), "Expected both to be nested"),
    }
    for name, (fn, expected) in calls.items():
        call = in_region("torch", fn, "amp")
        if "float" in expected:
            assert str(call().dtype) == f"torch.{expected}", name
            torch.testing.assert_close(call().float(), fn(), atol=0.02, rtol=0.02)
        else:
            with pytest.raises(RuntimeError, match=expected):
                call()


def test_explain_says_that_nothing_is_added_up(torch: Any) -> None:
    x = torch.ones(3)
    product = in_region("torch", lambda: x[:, None] @ x[None], "amp")
    assert "it adds nothing up" in str(polymp.torch.explain(product))


LOW_GRID = polymp.policy({"name": "of a low grid", "rules": {"grid_sample": "lower"}})


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
@pytest.mark.parametrize("policy", ["amp", "lean", "matmul", FP32, OWN, LOW_GRID], ids=str)
def test_grid_sample_of_a_low_input_computes_in_float32_on_a_cpu(
    torch: Any, policy: Any, low: str
) -> None:
    """And so do its gradients: torch's kernels for CPUs round each step, and get to 4 of 41."""
    dtype, sample = getattr(torch, low), torch.nn.functional.grid_sample
    for mode, dims in (("bilinear", 2), ("nearest", 2), ("bicubic", 2), ("bilinear", 3)):
        x = torch.randn((1, 2) + (4,) * dims, dtype=dtype)
        grid = torch.rand((1,) + (3,) * dims + (dims,), dtype=dtype) * 2 - 1
        same = torch.zeros((1, N) + (1,) * (dims - 1) + (dims,), dtype=dtype)
        leaf = torch.ones_like(x, requires_grad=True)
        with region("torch", low, policy):
            y = sample(x, grid, mode, align_corners=False)
            often = sample(leaf, same, mode, align_corners=False)
        exact = sample(x.float(), grid.float(), mode, align_corners=False)
        assert y.dtype is (torch.float32 if policy in (FP32, "matmul") else dtype), mode
        assert torch.equal(y, exact.to(y.dtype)), mode
        often.backward(torch.full_like(often, 0.01))
        assert leaf.grad is not None
        assert float(leaf.grad[0, 0].sum()) == pytest.approx(0.01 * N, rel=0.01), mode


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
@pytest.mark.parametrize("policy", ["amp", "lean", "matmul", FP32, OWN], ids=str)
def test_gradients_of_what_is_read_often_are_added_up_in_float32(
    torch: Any, policy: Any, low: str
) -> None:
    """4,096 gradients of 0.01 for one row: torch's kernels for CPUs get to 4 in bfloat16."""
    at = torch.zeros(N, dtype=torch.long)
    F, bags = torch.nn.functional, at[:, None]
    reads = {
        "x[at]": lambda x: x[at],
        "x[at, at]": lambda x: x[at, at],
        "embedding": lambda x: F.embedding(at, x),
        "embedding_bag": lambda x: F.embedding_bag(bags, x, mode="sum"),
        "means of bags": lambda x: F.embedding_bag(bags, x, mode="mean", padding_idx=1),
        "weighted bags": lambda x: F.embedding_bag(
            bags, x, mode="sum", per_sample_weights=torch.ones_like(bags, dtype=x.dtype)
        ),
        "take": lambda x: x.take(at),
        "take_along_dim": lambda x: x.take_along_dim(at[:, None], 0),
        "index_select": lambda x: x.index_select(0, at),
        "index_select of numbers": lambda x: x[:, 0].index_select(0, at),
        "gather": lambda x: x.gather(0, at[:, None]),
    }
    for name, read in reads.items():
        leaf = torch.ones(2, 2, dtype=getattr(torch, low), requires_grad=True)
        with region("torch", low, policy):
            y = read(leaf)
            assert y.dtype is leaf.dtype, name
        y.backward(torch.full_like(y, 0.01))
        assert leaf.grad is not None
        assert float(leaf.grad[0, 0]) == pytest.approx(0.01 * N, rel=0.01), name
        with region("torch", low, policy), torch.no_grad():
            assert torch.equal(read(leaf), y), name


OWN_JAX = {
    "all": {"rules": {"all": "fp32"}},
    "all lower": {"rules": {"all": "lower"}},
    "gather": {"rules": {"gather": "lower"}},
    "linear": {"rules": {"linear": "lower"}},
    "scatter_add": {"rules": {"scatter_add": "fp32_keep"}},
    "scatter_add low": {"rules": {"scatter_add": "lower"}},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", ["amp", "lean", "matmul", "torch-cpu", "torch-cuda", *OWN_JAX])
@pytest.mark.parametrize("inside", [False, True], ids=["gradient of a region", "inside"])
def test_gradients_of_what_is_read_often_in_jax(policy: str, inside: bool) -> None:
    """As in torch: the gradients are added up in float32, and reading casts no table."""
    need("jax")
    import jax
    import jax.numpy as jnp
    from flax import nnx

    at, opened = jnp.zeros(N, int), region("jax", "bfloat16", OWN_JAX.get(policy, policy))
    table = nnx.Embed(2, 2, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graph, _ = nnx.split(table)
    reads = {
        "x[at]": lambda x: x[at],
        "at[].get": lambda x: x.at[at].get(),
        "take": lambda x: jnp.take(x, at, axis=0),
        "take_along_axis": lambda x: jnp.take_along_axis(x, at[:, None], 0),
        "vmap": lambda x: jax.vmap(lambda i: x[i])(at),
        "segment_sum": lambda x: jax.ops.segment_sum(x[at], at, 1)[at] / N,
        "Embed": lambda x: nnx.merge(graph, nnx.State({"embedding": nnx.Param(x)}))(at),
    }
    low = policy.startswith(("torch-", "scatter_add low"))
    if low or policy in ("all lower", "gather", "linear"):
        del reads["segment_sum"]  # the function's own sum follows the policy

    @jax.jit
    def all_of(x: Any) -> Any:
        """By name the gradient, and what is read in the region and without it."""
        found = {}
        for name, read in reads.items():

            def loss(x: Any, read: Any = read) -> Any:
                return (read(x) * jnp.bfloat16(0.01)).astype(jnp.float32).sum()

            gradient = opened(jax.grad(loss)) if inside else jax.grad(opened(loss))
            found[name] = gradient(x), opened(read)(x), read(x)
        return found

    x = jnp.ones((2, 2), jnp.bfloat16)
    for name, (gradient, ours, plain) in all_of(x).items():
        assert float(gradient[0, 0]) == pytest.approx(4 if low else 0.01 * N, rel=0.01), name
        if name != "segment_sum":
            assert "f32" not in str(jax.make_jaxpr(opened(reads[name]))(x)), name
            assert jnp.array_equal(ours, plain), name
