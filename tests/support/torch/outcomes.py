"""The outcome of one call of an op, in a form that can be compared, pickled and printed.

On tensors with data the outcome of a call is every bit of its outputs and gradients, or the
exception. Without a GPU those for CUDA are fake: the outcome is the dtypes of the outputs, or the
exception, and the dtypes in which the op was called below autocast.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Enter = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Seen:
    """A tensor with data as plain values; a sparse one is made dense, and its layout noted."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    view: bool
    layout: str
    bits: bytes


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call: outputs, gradients, an error; and on CUDA the calls it made.

    Outputs beside an error are those of a call that has no gradients.
    """

    outputs: tuple[Any, ...] = ()
    gradients: tuple[Any, ...] = ()
    error: str = ""
    calls: tuple[str, ...] = ()


def on_data(
    call: Callable[[], list[Any]],
    leaves: list[torch.Tensor],
    enter: Enter,
    differentiable: Callable[[int], bool] = lambda at: True,
    scratch: Callable[[int], bool] = lambda at: False,
    inside: bool = False,
) -> Outcome:
    """The outcome of a call on tensors with data, on whatever device they are."""
    outputs: tuple[Any, ...] = ()
    with warnings.catch_warnings():  # of deprecated ops torch warns once, whoever comes first
        warnings.simplefilter("ignore")
        try:
            with ExitStack() as region:
                region.enter_context(enter())
                made = call()
                outputs = tuple(see(out, bits=not scratch(at)) for at, out in enumerate(made))
                if not inside:
                    region.close()
                gradients = _gradients(
                    [out for at, out in enumerate(made) if differentiable(at)], leaves
                )
        except Exception as error:
            return Outcome(outputs, error=message(error))
    return Outcome(outputs, tuple(map(see, gradients)))


def _gradients(outputs: list[Any], leaves: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    wanted = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
    if not wanted or not leaves:
        return ()
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(out.shape, generator=generator).to(out) for out in wanted]
    return torch.autograd.grad(wanted, leaves, cotangents, allow_unused=True)


def see(value: Any, *, bits: bool = True) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    layout = str(value.layout)
    value = value if value.layout is torch.strided else value.to_dense()
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return Seen(
        word(value),
        tuple(value.shape),
        value.stride(),
        value.requires_grad,
        value._is_view(),
        layout,
        plain.view(torch.uint8).numpy().tobytes() if bits else b"",
    )


def message(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class CallRecorder(TorchDispatchMode):
    """Notes every op that arrives below autocast, with the dtypes of its tensors."""

    # Casts, and questions about a tensor, are no computation.
    uncounted = ("aten::_to_copy", "aten::to.", "prim::")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func.name().startswith(self.uncounted):
            found = map(word, tree_leaves((args, kwargs)))
            self.calls.append(f"{func.name()}({', '.join(filter(None, found))})")
        return func(*args, **kwargs)


def word(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return str(leaf.dtype).removeprefix("torch.")
    return f"dtype={leaf}".replace("torch.", "") if isinstance(leaf, torch.dtype) else ""


@cache
def fake_mode() -> FakeTensorMode:
    return FakeTensorMode()


def fake(tensor: torch.Tensor, device: str) -> torch.Tensor:
    with fake_mode():
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
        )


def on_cuda(call: Callable[[], Any], enter: Enter, inference: bool = True) -> Outcome:
    """The outcome of a call on fake tensors, inside the region that `enter` opens."""
    recorder = CallRecorder()
    error, outputs = "", []
    with warnings.catch_warnings(), torch.inference_mode(inference):
        warnings.simplefilter("ignore")
        try:
            with enter(), fake_mode(), recorder:
                outputs = tree_leaves(call())
        except Exception as caught:
            error = message(caught)
    shown = tuple(
        f"{word(out)} {tuple(out.shape)} on {out.device}" if isinstance(out, torch.Tensor) else out
        for out in outputs
    )
    return Outcome(shown, (), error, tuple(recorder.calls))


@contextmanager
def torch_cuda(low: torch.dtype) -> Iterator[None]:
    """torch's autocast for CUDA, on by its setters: torch.autocast refuses without a GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", low)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


class Listed(NamedTuple):
    title: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@cache
def listed(device: str) -> tuple[Listed, ...]:
    mode = fake_mode() if device == "cuda" else nullcontext()
    with torch.random.fork_rng(), mode:
        torch.manual_seed(0)
        kind = {"cpu": "AutocastCPUTestLists", "cuda": "AutocastTestLists"}[device]
        lists = vars(getattr(_lists_module(), kind)(torch.device(device)))
    modules = {"nn": torch._C._nn, "linalg": torch._C._linalg, "banned": torch._C._nn}
    found = []
    for title, entries in lists.items():
        for at, (name, *rest) in enumerate(entries):
            kwargs = next((item for item in rest if isinstance(item, dict)), {})
            for which, args in enumerate(item for item in rest if isinstance(item, tuple)):
                if title.startswith("methods"):
                    function = _method(name)
                else:
                    module = modules.get(title.partition("_")[0], torch)
                    function = getattr(module, name)
                found.append(Listed(f"{title}[{at}.{which}] {name}", function, args, kwargs))
    return tuple(found)


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)


def _lists_module() -> Any:
    """torch's file of lists, without the test machinery that it imports and does not need here."""
    spec = importlib.util.find_spec("torch.testing._internal.autocast_test_lists")
    machinery = types.ModuleType("torch.testing._internal.common_utils")
    vars(machinery).update(TEST_WITH_ROCM=False, TestCase=unittest.TestCase)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {machinery.__name__: machinery}):
        spec.loader.exec_module(module)
    return module
