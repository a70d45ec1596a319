"""Gradients of every kind: dtypes, layouts, and optimizers that have some of each or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from polymp.torch import GradScaler
from tests.support.torch.models import seen

INF, NAN = float("inf"), float("nan")

pytestmark = pytest.mark.filterwarnings("ignore:.*invariant checks:UserWarning")
REAL = (torch.float32, torch.bfloat16, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
EVERY = (*REAL, torch.float16, *COMPLEX)

# Values that every dtype holds: the scaled ones are 2**10 times as large.
VALUES = (0.0, -0.0, 1.0, -2.5, 2.0**-20, 60.0, -(2.0**-24))


def values(dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    real = torch.tensor(VALUES, dtype=torch.float64) * scale
    if dtype.is_complex:
        return torch.complex(real, real.flip(0)).to(dtype)
    return real.to(dtype)


def dense(dtype: torch.dtype, scale: float) -> torch.Tensor:
    p = torch.zeros(len(VALUES), dtype=dtype, requires_grad=True)
    p.grad = values(dtype, scale)
    return p


def transposed(dtype: torch.dtype, scale: float) -> torch.Tensor:
    p = torch.zeros(len(VALUES), 2, dtype=dtype, requires_grad=True)
    p.grad = torch.stack([values(dtype, scale), values(dtype, scale).flip(0)]).t()
    assert not p.grad.is_contiguous()
    return p


def conjugated(dtype: torch.dtype, scale: float) -> torch.Tensor:
    """The gradient is a lazy conjugate, where the dtype has one."""
    p = torch.zeros(len(VALUES), dtype=dtype, requires_grad=True)
    p.grad = values(dtype, scale).conj()
    assert p.grad.is_conj() == dtype.is_complex
    return p


def coalesced(dtype: torch.dtype, scale: float) -> torch.Tensor:
    p = torch.zeros(20, dtype=dtype, requires_grad=True)
    where = torch.arange(len(VALUES))[None] * 2
    p.grad = torch.sparse_coo_tensor(where, values(dtype, scale), (20,)).coalesce()
    return p


def uncoalesced(dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Two entries for one place, whose sum counts."""
    p = torch.zeros(20, dtype=dtype, requires_grad=True)
    where = torch.tensor([[0, 3, 5, 7, 9, 3, 19]])
    p.grad = torch.sparse_coo_tensor(where, values(dtype, scale), (20,))
    assert not p.grad.is_coalesced()
    return p


KINDS: dict[str, Callable[[torch.dtype, float], torch.Tensor]] = {
    f.__name__: f for f in (dense, transposed, conjugated, coalesced, uncoalesced)
}
every = pytest.mark.parametrize("dtype", EVERY, ids=str)
kinds = pytest.mark.parametrize("kind", KINDS)


def ready(scale: float = 1024.0, **options: Any) -> GradScaler:
    scaler = GradScaler("cpu", **{"init_scale": scale, "allow_fp16": True} | options)
    scaler.scale(torch.ones(()))
    return scaler


def unscaled(scaler: Any, params: list[torch.Tensor]) -> bool:
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(float(f) for f in found.values())


@kinds
@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("scale", [3.0, 65536.0, 1.1])
def test_bit_for_bit_what_torch_unscales(dtype, kind, scale) -> None:
    ours, theirs = KINDS[kind](dtype, 1.0), KINDS[kind](dtype, 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    assert unscaled(ready(scale), [ours]) == unscaled(scaler, [theirs]) is False
    assert seen(ours.grad) == seen(theirs.grad)


@pytest.mark.parametrize("kind", ["dense", "coalesced"])
def test_float16_and_complex_are_those_of_torchs_kernel(kind) -> None:
    """torch refuses them in its scaler; its kernel takes their values."""
    for dtype in (torch.float16, *COMPLEX):
        p, q = KINDS[kind](dtype, 1.0), KINDS[kind](dtype, 1.0)
        unscaled(ready(3.0), [p])
        raw = q.grad if kind == "dense" else q.grad._values()
        raw = torch.view_as_real(raw) if dtype.is_complex else raw
        inverse = torch.tensor(3.0).double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_([raw], torch.zeros(()), inverse)
        assert seen(p.grad) == seen(q.grad)


@pytest.mark.one_in(3)
@every
@kinds
@given(
    at=st.integers(0, len(VALUES) - 1), bad=st.sampled_from([INF, -INF, NAN]), part=st.booleans()
)
def test_one_bad_value_is_found_anywhere(dtype, kind, at, bad, part) -> None:
    p = KINDS[kind](dtype, 1.0)
    raw = p.grad if p.grad.layout is torch.strided else p.grad._values()
    with torch.no_grad():
        raw[at] = complex(1.0, bad) if dtype.is_complex and part else bad
    good = [KINDS[k](dtype, 1.0) for k in KINDS]
    assert unscaled(ready(), [*good[:2], p, *good[2:]])
    assert not unscaled(ready(), good)


def test_float16_gradients_are_refused_unless_asked_for_and_nothing_has_changed() -> None:
    for kind in KINDS:
        first, p = dense(torch.float32, 1024.0), KINDS[kind](torch.float16, 1024.0)
        before = seen(first.grad), seen(p.grad)
        optimizer = torch.optim.SGD([first, p], lr=1.0)
        with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\.$"):
            ready(allow_fp16=False).unscale_(optimizer)
        assert (seen(first.grad), seen(p.grad)) == before


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
@pytest.mark.filterwarnings("ignore:.*in beta state:UserWarning")
def test_compressed_gradients(layout) -> None:
    make = {
        "csr": lambda t: t.to_sparse_csr(),
        "csc": lambda t: t.to_sparse_csc(),
        "bsr": lambda t: t.to_sparse_bsr((2, 2)),
        "bsc": lambda t: t.to_sparse_bsc((2, 2)),
    }[layout]
    for spoil in (False, True):
        raw = torch.tensor([[1024.0, 0, 0, 0], [0, 512.0, 0, 0]])
        if spoil:
            raw[1, 1] = NAN
        p = make(torch.zeros(2, 4)).requires_grad_()
        p.grad = make(raw)
        assert unscaled(ready(), [p]) is spoil
        assert p.grad.to_dense()[0, 0] == 1.0


choice = st.tuples(st.sampled_from(EVERY), st.sampled_from(sorted(KINDS)), st.booleans())


@given(chosen=st.lists(choice, min_size=1, max_size=8), spoiled=st.integers(-8, 7))
@example(chosen=[(dtype, kind, True) for dtype in EVERY for kind in KINDS], spoiled=-1)
def test_an_optimizer_may_have_gradients_of_every_kind(chosen, spoiled) -> None:
    """Divided by a power of two, they come out as they were."""
    params, wanted = [], []
    for at, (dtype, kind, has) in enumerate(chosen):
        p, w = KINDS[kind](dtype, 1024.0), KINDS[kind](dtype, 1.0)
        if at == spoiled and has:
            raw = p.grad if p.grad.layout is torch.strided else p.grad._values()
            raw[2] = INF
        if not has:
            p.grad = w.grad = None
        params.append(p)
        wanted.append(w)
    scaler = ready()
    if not any(has for *_, has in chosen):
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler.unscale_(optimizer)
        assert not scaler.step_skipped(optimizer)  # there is nothing to skip
        return
    bad = 0 <= spoiled < len(chosen) and chosen[spoiled][2]
    assert unscaled(scaler, params) == bad
    for at, (p, w) in enumerate(zip(params, wanted, strict=True)):
        assert (p.grad is None) == (w.grad is None)
        if p.grad is not None and at != spoiled:
            assert (p.grad.dtype, p.grad.layout) == (w.grad.dtype, w.grad.layout)
            assert seen(p.grad) == seen(w.grad)


def test_two_losses_of_one_optimizer_have_a_scaler_each() -> None:
    weight = torch.tensor([1.0, -2.0], requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scalers = [GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    for bad in (None, 1, None, None):
        before, total = weight.tolist(), torch.zeros(2)
        for at, scaler in enumerate(scalers):
            optimizer.zero_grad()
            loss = (weight * (at + 1)).sum() * (1e38 if at == bad else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            total += weight.grad
        weight.grad = total
        if not any(scaler.step_skipped(optimizer) for scaler in scalers):
            assert total.tolist() == [3.0, 3.0]
            optimizer.step()
        assert (weight.tolist() == before) == (bad is not None)
        for scaler in scalers:
            scaler.update()
    assert [s.get_scale() for s in scalers] == [32.0, 8.0]


def test_a_wrapper_without_a_step_of_its_own_steps_as_in_torch() -> None:
    class Wrapper:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    def stepped(scaler: Any) -> list[float]:
        weight = torch.ones(2, requires_grad=True)
        scaler.scale(weight.sum()).backward()
        scaler.step(Wrapper(torch.optim.SGD([weight], 0.5, fused=True)))
        return weight.tolist()

    assert stepped(GradScaler("cpu", 8.0)) == stepped(torch.amp.GradScaler("cpu", 8.0))
