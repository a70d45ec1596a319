"""torch.export: the modes that record regions and ops, and contexts without them."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch


def export_modes() -> list[Any]:
    """Return the function modes with which torch.export traces, non-strictly; [] at other times.

    Export notes entering and leaving a region through them: torch's own autocast class calls
    `mode.__torch_function__(torch.amp._enter_autocast, (), state)`.
    """
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    modes = torch.overrides._get_current_function_mode_stack()
    return [mode for mode in modes if isinstance(mode, PreDispatchTorchFunctionMode)]


# The ops that enter and leave a region in a graph.
ENTER, LEAVE = torch.amp._enter_autocast, torch.amp._exit_autocast  # type: ignore[attr-defined]

# The op for a region that has a graph of its own.
WITHIN = "wrap_with_autocast"


def proxy_mode() -> Any:
    """Return the mode with which torch.export records ops, None without one."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode()


def decompositions(mode: Any) -> dict[Any, Callable[..., Any]]:
    """Return the table, by op, that a recording mode asks first; inner graphs inherit it.

    Since torch 2.13 the mode has it, before that its module, in 2.12 as a context variable.
    """
    from torch.fx.experimental import proxy_tensor

    table = getattr(mode, "decomposition_table", None)
    if table is None:
        table = proxy_tensor.CURRENT_DECOMPOSITION_TABLE  # type: ignore[attr-defined]
        table = table.get() if isinstance(table, ContextVar) else table
    return table  # type: ignore[no-any-return]


def unrecorded() -> Any:
    """Return a context in which torch.export records no ops."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    return disable_proxy_modes_tracing()


def without_recorder() -> Any:
    """Return a context without the mode by which torch.export records regions."""
    from torch.fx.experimental import proxy_tensor

    return proxy_tensor._temp_remove_pre_dispatch_torch_function_mode()
