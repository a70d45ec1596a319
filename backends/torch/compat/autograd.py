"""Autograd: the nodes of the graph, tensors saved for backward, checkpoints."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def carry_into_recomputation(carry: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have torch.utils.checkpoint recompute `carry(function)` in place of `function`.

    `carry` is called in the forward pass, in every checkpoint of both kinds. A `context_fn`, the
    documented way, has to be given in each call of `checkpoint`, and works for one kind only.
    `CheckpointFunction` is public, its `ctx.run_function` since torch 1.0; `_CheckpointFrame` since
    torch 2.1.
    """
    from torch.utils import checkpoint

    function: Any = checkpoint.CheckpointFunction
    frame: Any = checkpoint._CheckpointFrame
    forward, make = function.forward, frame.__init__

    @functools.wraps(forward)
    def carried_forward(ctx: Any, *args: object) -> Any:
        outputs = forward(ctx, *args)
        ctx.run_function = carry(ctx.run_function)
        return outputs

    @functools.wraps(make)
    def carried_make(self: Any, recompute_fn: Any, *args: object, **kwargs: object) -> None:
        make(self, carry(recompute_fn), *args, **kwargs)

    function.forward = staticmethod(carried_forward)
    frame.__init__ = carried_make


def latest_node() -> int:
    """Return the number of the autograd node that was made last in this thread.

    Below autograd, where an op with gradients runs, it is the op's own node, for that is made
    before the op runs. `_get_sequence_nr` since torch 2.1; torch.fx.traceback goes by it, too.
    """
    return int(torch._C._autograd._get_sequence_nr()) - 1


def backward_node() -> int | None:
    """Return the number of the node whose backward runs here; None outside of a backward pass.

    Nodes that accumulate into leaves have no number of their own; for them it is -1.
    `_current_graph_task_id` and `_current_autograd_node` since torch 2.0.
    """
    if torch._C._current_graph_task_id() < 0:
        return None
    node = torch._C._current_autograd_node()
    number = -1 if node is None else int(node._sequence_nr())
    return -1 if number >= 2**63 else number


def backward_task() -> int | None:
    """Return a number for the backward pass that runs here; None outside. Since torch 2.0."""
    number = int(torch._C._current_graph_task_id())
    return None if number < 0 else number


def saved_tensors_shown(stack: ExitStack, see: Callable[[torch.Tensor], None]) -> None:
    """Call a function with every tensor saved for backward in this thread until a stack is closed.

    torch.func's transforms refuse to run under hooks on saved tensors, which they find out by the
    documented `torch.autograd.graph.disable_saved_tensors_hooks`. That function is replaced for the
    time by one that first takes these hooks off, so that transforms run as without
    them. `_top_saved_tensors_default_hooks` since torch 2.3.
    """

    def pack(t: torch.Tensor) -> torch.Tensor:
        see(t)
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    graph: Any = torch.autograd.graph

    def end() -> None:
        with showing.lock:
            showing.hooks.pop(pack, None)
            if not showing.hooks:
                graph.disable_saved_tensors_hooks = _DISABLE

    stack.callback(end)
    stack.callback(end)  # an interrupt may end one of the two
    with showing.lock:
        showing.hooks[pack] = hooks
        graph.disable_saved_tensors_hooks = _disable_hooks
    stack.enter_context(hooks)


_DISABLE = torch.autograd.graph.disable_saved_tensors_hooks


class Showing:
    """The hooks of `saved_tensors_shown` that are in force, in all threads of this process.

    Attributes:
        hooks: by the function that packs.
        lock: held while any come or go.
    """

    def __init__(self) -> None:
        self.hooks: dict[Any, Any] = {}
        self.lock: threading.RLock = threading.RLock()


showing: Showing = Showing()


@contextmanager
def _disable_hooks(message: str) -> Iterator[None]:
    with ExitStack() as stack:
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is not None and (hooks := showing.hooks.get(top[0])) is not None:
            hooks.__exit__(None, None, None)
            stack.callback(hooks.__enter__)
            stack.enter_context(_disable_hooks(message))  # there may be more below
        else:
            stack.enter_context(_DISABLE(message))
        yield
