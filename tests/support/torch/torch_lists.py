"""The calls in the lists of torch's own autocast tests, as they come with the installed torch."""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch

from tests.support.torch.outcomes import fake_mode


class Listed(NamedTuple):
    """A call of a public function, and where it stands in the lists."""

    title: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@cache
def listed(device: str) -> tuple[Listed, ...]:
    """The calls for a device; for CUDA on fake tensors."""
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
    assert spec is not None
    assert spec.loader is not None
    machinery = types.ModuleType("torch.testing._internal.common_utils")
    vars(machinery).update(TEST_WITH_ROCM=False, TestCase=unittest.TestCase)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {machinery.__name__: machinery}):
        spec.loader.exec_module(module)
    return module
