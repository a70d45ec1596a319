"""Everything private of torch that polymp touches, in one place.

Each name says why it is needed and since when it has been there; `tests/torch/test_compat.py`
fails when one changes. Supported: torch 2.11 to 2.13.
"""

import sys
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._C import _dynamo
from torch._C import _ExcludeDispatchKeyGuard as ExcludeKeys
from torch.library import Library

__all__ = ["ExcludeKeys"]

F = TypeVar("F", bound=Callable[..., Any])

# Where an op looks first while a torch.func transform is active. Since torch 2.0.
FUNC_FRONT = "FuncTorchDynamicLayerFrontMode"


def autocast_key(device: str) -> str | None:
    """The name of the dispatch key that autocast uses on the device type. Since torch 1.10.

    None where Python cannot name it, as for XLA: nothing can be registered there from Python.
    """
    private = device == torch._C._get_privateuse1_backend_name()
    key = "AutocastPrivateUse1" if private else f"Autocast{device.upper()}"
    return key if hasattr(torch._C.DispatchKey, key) else None


def keyset(key: str) -> torch._C.DispatchKeySet:
    """The set of one dispatch key, for `ExcludeKeys`. Since torch 1.13."""
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))


def below(key: str) -> torch._C.DispatchKeySet:
    """All keys that the dispatcher asks after `key`. Since torch 2.0."""
    return torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))


def registered(key: str) -> frozenset[str]:
    """Names of the aten overloads that have a kernel on the key, without "aten::".

    Needed to know which compiled autocast kernels this torch has. Since torch 2.0.
    """
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return frozenset(n.removeprefix("aten::") for n in names if n.startswith("aten::"))


def overload(name: str) -> torch._ops.OpOverload | None:
    """The aten overload "mm" or "softmax.int", or None if torch has none of that name."""
    base, _, variant = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    if packet is None or variant == "default":  # which is written "mm", not "mm.default"
        return None
    return getattr(packet, variant or "default", None)


def passing_on(op: torch._ops.OpOverload, key: str) -> Callable[..., Any]:
    """A function of (keys, args, kwargs) that does what the dispatcher does had `key` no kernel.

    `OpOverload.redispatch` (since torch 2.0) refuses a Python number where the schema says Tensor,
    and `x + 1` comes as (x, 1); calling the op anew takes it, with the key excluded.
    """
    after, excluded = below(key), keyset(key)
    tensors = [at for at, a in enumerate(op._schema.arguments) if at and str(a.type) == "Tensor"]

    def call(keys: torch._C.DispatchKeySet, args: Any, kwargs: Any) -> Any:
        for at in tensors:
            if at < len(args) and not isinstance(args[at], torch.Tensor):
                with ExcludeKeys(excluded):
                    return op(*args, **kwargs)
        return op.redispatch(keys & after, *args, **kwargs)

    return call


def put(library: Library, name: str, kernel: Callable[..., Any], key: str) -> None:
    """Register a kernel that takes the keyset first, over whatever is on the key.

    torch warns once when a kernel is replaced; here that is the intention. `with_keyset` since
    torch 2.1.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(name, kernel, key, with_keyset=True)


def cuda_missing() -> bool:
    """True if neither CUDA nor torch_xla can be used: torch.amp then disables itself.

    Read from torch so that a test which patches it there is seen here. Since torch 1.10.
    """
    return bool(torch.cuda.amp.common.amp_definitely_not_available())


def private_dtypes(device: str) -> list[torch.dtype]:
    """Low dtypes of a device that an extension registered as PrivateUse1. Since torch 2.1.

    Raises:
        AssertionError: the extension has not registered its module, or not all of it.
    """
    message = (
        f"Tried to use AMP with the `{device}` backend, but the backend has not registered a "
        "module or  the module miss some necessary funcs. The backend should register a module by "
        "`torch._register_device_module`, and the module must have these funcs: \n"
        "`get_amp_supported_dtype() -> List[torch.dtype]`. \n"
    )
    if not hasattr(torch, device):
        raise AssertionError(message)
    if not hasattr(getattr(torch, device), "get_amp_supported_dtype"):
        raise AssertionError(message + "But the func `get_amp_supported_dtype` is missing. \n")
    found: list[torch.dtype] = getattr(torch, device).get_amp_supported_dtype()
    return found


def no_frame(fn: F) -> F:
    """Keep torch.compile from compiling `fn` by itself; inlining it into a caller still works.

    A region's entry has no tensor in it, so a frame compiled for it alone would be an empty graph
    and the region would silently be lost. `torch.compiler.disable` would forbid inlining as well.
    Since torch 2.6 (`torch._dynamo.eval_frame.skip_code` is the same call, but imports all of
    dynamo).
    """
    assert isinstance(fn, FunctionType)
    frame = _dynamo.eval_frame
    strategy = frame._FrameExecStrategy(frame._FrameAction.SKIP, frame._FrameAction.DEFAULT)
    frame.set_code_exec_strategy(fn.__code__, strategy)
    return fn


def at_trace_time(fn: F) -> F:
    """Have torch.compile run `fn` while it traces and take what it returns as a constant.

    `torch.compiler.assume_constant_result` sets the same mark, but imports all of dynamo.
    Since torch 2.0.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def after_tracing(undo: Callable[[], object]) -> None:
    """If dynamo is tracing in this thread, have it call `undo` when it is done or has given up.

    Dynamo's own handlers of the autocast setters do the same, but in torch 2.13 they fail in the
    bodies of higher-order ops (autograd functions, checkpoint). Since torch 2.1.
    """
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    translator = getattr(convert and convert.tls, "current_tx", None)
    if translator is not None:
        translator.output.add_cleanup_hook(undo)


def export_modes() -> list[Any]:
    """The function modes with which torch.export traces, non-strictly; none at other times.

    Export notes entering and leaving a region through them: torch's own autocast class calls
    `mode.__torch_function__(torch.amp._enter_autocast, (), state)`. Since torch 2.5.
    """
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    modes = torch.overrides._get_current_function_mode_stack()
    return [mode for mode in modes if isinstance(mode, PreDispatchTorchFunctionMode)]
