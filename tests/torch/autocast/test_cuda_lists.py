"""CUDA regions against the dtypes that torch's own CUDA lists ask for, on fake tensors.

`torch.testing._internal.autocast_test_lists` names calls and sorts them by the dtype that they must
give under CUDA autocast. Here they run on tensors without data, so no GPU is needed: in torch's
state, which shows that the expectation is right, and in polymp's regions on both engines. What
PyTorch's tests of CUDA autocast check besides the lists, and needs no gradient, follows below;
autograd on such tensors would abort the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polymp.backends.torch.autocast import kernel_registry
from polymp.torch import autocast, custom_bwd, custom_fwd
from tests.support.torch.outcomes import Outcome, fake_mode, on_cuda, torch_cuda
from tests.support.torch.torch_lists import Listed, listed
from tests.support.torch.version_changes import ASK_FOR_DRIVER

pytestmark = pytest.mark.usefixtures("left_as_found", "cuda_there")

Enter = Callable[[], AbstractContextManager[Any]]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW = (FP16, BF16)
COMPARISONS = {"eq", "ge", "gt", "le", "lt", "ne"}

# Calls that raise in torch's state as well on a build without CUDA; the two errors are compared.
NEED_NO_RESULT = {
    "binary_cross_entropy": "forbidden: the error is its result",
    "einsum": "torch's list has no equation where its own test reads one, and leaves the row out",
    "equal": "its result is a value, and fake tensors have none",
    "cudnn_convolution": "asks for a CUDA build of torch",
    "cudnn_convolution_transpose": "asks for a CUDA build of torch",
    "gru_cell": "asks for a CUDA build of torch",
    "grid_sampler": "asks for a CUDA build of torch",
    **{op: "asks for a driver" for op in ASK_FOR_DRIVER if "." not in op},
}


@pytest.fixture
def cuda_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU a CUDA region turns itself off; here it believes that there is one."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def name_of(row: Listed) -> str:
    return row.title.split()[-1]


def expected(row: Listed, low: torch.dtype) -> str:
    """The dtype that the row must give in a region of that low dtype."""
    kind = row.title.partition("[")[0]
    if kind.endswith("fp16"):
        return short(low)
    if kind.endswith("expect_builtin_promote") and name_of(row).strip("_") in COMPARISONS:
        return "bool"
    return "float32"


def spellings(row: Listed) -> Iterator[Callable[[], Any]]:
    """The call as listed, and as a method where tensors have it."""
    yield functools.partial(row.function, *row.args, **row.kwargs)
    first, name = row.args[0], name_of(row)
    if isinstance(first, torch.Tensor) and hasattr(first, name):
        yield lambda: getattr(first, name)(*row.args[1:], **row.kwargs)


def outcomes(row: Listed, enter: Enter) -> list[Outcome]:
    return [on_cuda(call, enter) for call in spellings(row)]


def as_expected(row: Listed, low: torch.dtype, found: list[Outcome]) -> bool:
    """True if every output of every spelling has the dtype that the list asks for."""
    dtypes = {str(out).split()[0] for outcome in found for out in outcome.outputs}
    return dtypes == {expected(row, low)} and not any(outcome.error for outcome in found)


# The rows that promote have a float16 input, which a bfloat16 region refuses.
CALLS = [
    pytest.param(row, low, id=f"{row.title}-{short(low)}")
    for row in listed("cuda")
    for low in (LOW if "need_autocast_promote" not in row.title else (FP16,))
]


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize(("row", "low"), CALLS)
def test_a_listed_call_gives_the_dtype_of_its_list(
    row: Listed, low: torch.dtype, engine: str
) -> None:
    theirs = outcomes(row, functools.partial(torch_cuda, low))
    with kernel_registry.all_python("cuda") if engine == "python" else nullcontext():
        ours = outcomes(row, lambda: autocast("cuda", low))
    assert ours == theirs
    if name_of(row) not in NEED_NO_RESULT:
        assert as_expected(row, low, theirs), "torch's own state does not give what its list says"
        assert as_expected(row, low, ours)


def test_banned_calls_say_what_to_use_instead() -> None:
    banned = [row for row in listed("cuda") if row.title.startswith("banned")]
    assert [name_of(row) for row in banned] == ["binary_cross_entropy"]
    (outcome, *_) = outcomes(banned[0], lambda: autocast("cuda"))
    assert outcome.error.startswith("RuntimeError: torch.nn.functional.binary_cross_entropy and ")


def test_rows_without_a_result_are_few() -> None:
    rows = {name_of(row) for row in listed("cuda")}
    assert rows >= NEED_NO_RESULT.keys(), "a row that torch no longer lists"
    assert len(listed("cuda")) > 100


def test_a_region_that_does_nothing_is_noticed() -> None:
    seen: dict[str, list[bool]] = {}
    for row in listed("cuda"):
        if row.title.startswith("banned"):
            continue
        off = outcomes(row, lambda: autocast("cuda", enabled=False))
        seen.setdefault(row.title.partition("[")[0], []).append(as_expected(row, FP16, off))
    builtin = {kind for kind in seen if kind.endswith("expect_builtin_promote")}
    assert {kind for kind, passed in seen.items() if all(passed)} <= builtin
    assert not any(seen["torch_fp16"] + seen["nn_fp16"] + seen["linalg_fp16"])
    assert sum(seen["torch_fp32"]) < len(seen["torch_fp32"]) / 4


# --- what is no list ------------------------------------------------------------------------------


def ones(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    with fake_mode():
        return torch.ones(shape, dtype=dtype, device="cuda")


IGNORING = {
    "lower": lambda x: torch.mm(x, x),
    "fp32": lambda x: torch.pow(x, 2.0),
    "fp32 by dtype argument": torch.sum,
    "fp32 by appended dtype": torch.norm,
}
IGNORED = (torch.float64, torch.int32, torch.complex64)


@pytest.mark.parametrize("dtype", IGNORED, ids=short)
@pytest.mark.parametrize("rule", IGNORING)
def test_other_types_are_left_alone(rule: str, dtype: torch.dtype) -> None:
    x = ones(8, 8, dtype=dtype)
    in_region = on_cuda(lambda: IGNORING[rule](x), lambda: autocast("cuda"))
    outside = on_cuda(lambda: IGNORING[rule](x), nullcontext)
    in_torch = on_cuda(lambda: IGNORING[rule](x), lambda: torch_cuda(FP16))
    assert in_region == in_torch
    assert (in_region.outputs, in_region.error) == (outside.outputs, outside.error)


def test_a_float64_keeps_its_type_beside_the_low_one() -> None:
    wide, low = ones(8, 8, dtype=torch.float64), ones(8, 8, dtype=FP16)
    ours = on_cuda(lambda: torch.mm(wide, low), lambda: autocast("cuda"))
    assert ours == on_cuda(lambda: torch.mm(wide, low), lambda: torch_cuda(FP16))
    assert ours.calls == ("aten::mm(float64, float16)",)  # which fails on tensors with data


@pytest.mark.parametrize("low", LOW, ids=short)
def test_a_custom_function_meets_the_region_in_both_directions(low: torch.dtype) -> None:
    met: list[Any] = []

    @custom_fwd(device_type="cuda")
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        met.extend([a.dtype, b.dtype, torch.is_autocast_enabled("cuda")])
        return a.mm(b)

    @custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        met.extend([torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")])
        return grad.mm(ones(8, 8))

    ctx = SimpleNamespace()
    with fake_mode():
        with autocast("cuda", low):
            out = forward(ctx, ones(8, 8), ones(8, 8))
        grad = backward(ctx, out)  # outside, as autograd calls it
    assert met == [FP32, FP32, True, True, low]
    assert (out.dtype, grad.dtype) == (low, low)


def test_cast_inputs_reaches_into_containers_and_turns_the_region_off() -> None:
    met: list[Any] = []

    @custom_fwd(device_type="cuda", cast_inputs=FP32)
    def forward(ctx: Any, a: torch.Tensor, container: Any) -> torch.Tensor:
        b = container[1][0]
        met.extend([a.dtype, b.dtype, torch.is_autocast_enabled("cuda")])
        return a.mm(b)

    @custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        met.append(torch.is_autocast_enabled("cuda"))

    ctx = SimpleNamespace()
    low = ones(8, 8, dtype=FP16)
    with fake_mode():
        with autocast("cuda"):
            assert forward(ctx, low, (0, {0: low})).dtype is FP32
        backward(ctx, low)
        assert forward(ctx, low, (0, {0: low})).dtype is FP16, "a region where there is none"
    assert met == [FP32, FP32, False, False, FP16, FP16, False]
