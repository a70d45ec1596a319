"""Names that PyTorch's older test files import and the installed torch no longer has.

In goes a test file's text; `add_missing` puts a plain stand-in at each place in `STANDINS` that the
file imports from and that is empty, and says which. Both runs of a comparison get the same ones.
None has to do with autocast or scaling: they are decorators, flags and helpers of other tests.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def _no() -> bool:
    return False


def _plain(test: Any) -> Any:
    return test


def _plain_with(*_args: Any, **_kwargs: Any) -> Callable[[Any], Any]:
    return _plain


def _unused(*_args: Any, **_kwargs: Any) -> Any:
    raise NotImplementedError("a stand-in that no test compared here should call")


def _device_type(name: str) -> Any:
    return getattr(importlib.import_module("torch.testing._internal.common_device_type"), name)


def _skip_ops(_case: str, _test: str, to_skip: Any) -> Any:
    """Up to torch 2.9 the first arguments named the test; now the decorated function does."""
    return _device_type("skipOps")(to_skip)


def _xfail(*args: Any, **kwargs: Any) -> Any:
    return _device_type("xfail")(*args, **kwargs)


def _skip(*args: Any, **kwargs: Any) -> Any:
    return _device_type("skip")(*args, **kwargs)


_TESTING = "torch.testing._internal"
STANDINS: dict[tuple[str, str], Any] = {
    (f"{_TESTING}.common_cuda", "tf32_is_not_fp32"): _no,
    (f"{_TESTING}.common_mkldnn", "bf32_on_and_off"): _plain_with,
    (f"{_TESTING}.common_methods_invocations", "skip"): _skip,
    (f"{_TESTING}.common_methods_invocations", "skipOps"): _skip_ops,
    (f"{_TESTING}.common_methods_invocations", "xfail"): _xfail,
    (f"{_TESTING}.common_utils", "disable_translation_validation_if_dynamic_shapes"): _plain,
    (f"{_TESTING}.common_utils", "skipIfMps"): _plain,
    ("torch.autograd._functions.utils", "check_onnx_broadcast"): _unused,
    ("torch._custom_op.functional", "register_functional_op"): _unused,
    ("torch._six", "inf"): float("inf"),
    ("torch._six", "nan"): float("nan"),
    ("torch._six", "string_classes"): (str, bytes),
}
# Test files that others import for one name only: the module that has that name today.
MODULES = {"test_jit": f"{_TESTING}.jit_utils"}


def add_missing(text: str) -> list[str]:
    """Fills the gaps that a file of that text would meet; returns them as dotted names."""
    added = []
    for (module, name), value in STANDINS.items():
        if module not in text:
            continue
        try:
            owner = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:  # torch is there, but something that it needs is not
                raise
            owner = sys.modules[module] = ModuleType(module)
        if not hasattr(owner, name):
            setattr(owner, name, value)
            added.append(f"{module}.{name}")
    for name, module in MODULES.items():
        if f"from {name} import" in text:
            sys.modules[name] = importlib.import_module(module)
            added.append(name)
    return added
