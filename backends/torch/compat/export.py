"""torch.export: how it records regions and ops, and how not to be recorded."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch


def export_modes() -> list[Any]:
    """The function modes with which torch.export traces, non-strictly; none at other times.

    Export notes entering and leaving a region through them: torch's own autocast class calls
    `mode.__torch_function__(torch.amp._enter_autocast, (), state)`. Since torch 2.5.
    """
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    modes = torch.overrides._get_current_function_mode_stack()
    return [mode for mode in modes if isinstance(mode, PreDispatchTorchFunctionMode)]


# What enters and leaves a region in a graph, and a region that holds a graph. Since torch 2.5.
ENTER, LEAVE = torch.amp._enter_autocast, torch.amp._exit_autocast  # type: ignore[attr-defined]


WITHIN = "wrap_with_autocast"


def proxy_mode() -> Any:
    """The mode with which torch.export records ops, None while none does. Since torch 2.0."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode()


def decompositions(mode: Any) -> dict[Any, Callable[..., Any]]:
    """The table, by op, that a recording mode asks first; graphs inside the graph inherit it.

    Since torch 2.13 the mode has it, before that its module, in 2.12 as a context variable.
    """
    from torch.fx.experimental import proxy_tensor

    table = getattr(mode, "decomposition_table", None)
    if table is None:
        table = proxy_tensor.CURRENT_DECOMPOSITION_TABLE  # type: ignore[attr-defined]
        table = table.get() if isinstance(table, ContextVar) else table
    return table  # type: ignore[no-any-return]


def unrecorded() -> Any:
    """A context in which torch.export records no ops. Since torch 2.0."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    return disable_proxy_modes_tracing()


def without_recorder() -> Any:
    """A context without the mode in which torch.export records regions. Since torch 2.5."""
    from torch.fx.experimental import proxy_tensor

    return proxy_tensor._temp_remove_pre_dispatch_torch_function_mode()
