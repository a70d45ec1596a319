"""The front end of torch.compile and torch.export: functions that it skips; regions in graphs."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._C import _dynamo

F = TypeVar("F", bound=Callable[..., Any])


def no_frame(fn: F, *, inside: bool = False) -> F:
    """Keep torch.compile from compiling `fn` by itself; inlining it into a caller still works."""
    # A region's entry has no tensor in it, so a frame compiled for it alone would be an empty graph
    # and the region would silently be lost. `torch.compiler.disable` would forbid inlining as well,
    # and `torch._dynamo.eval_frame.skip_code` imports all of dynamo.
    assert isinstance(fn, FunctionType)
    frame = _dynamo.eval_frame
    called = frame._FrameAction.SKIP if inside else frame._FrameAction.DEFAULT
    strategy = frame._FrameExecStrategy(frame._FrameAction.SKIP, called)
    frame.set_code_exec_strategy(fn.__code__, strategy)
    return fn


def plain_name(name: str) -> str:
    """Return a module's or tensor's name without the part that torch.compile puts into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def untraced(reason: str) -> Callable[[F], F]:
    """Have torch.compile break the graph at calls of a function, and skip those that it calls."""
    # `torch.compiler.disable` sets the same marks, but imports all of dynamo. The error under
    # fullgraph shows the reason.

    def mark(fn: F) -> F:
        no_frame(fn, inside=True)
        fn._torchdynamo_disable = True  # type: ignore[attr-defined]
        fn._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return fn

    return mark


def at_trace_time(fn: F) -> F:
    """Have torch.compile run `fn` while it traces, and treat the result as a constant."""
    # `torch.compiler.assume_constant_result` sets the same mark, but imports all of dynamo.
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def in_graph(fn: Callable[..., Any]) -> None:
    """Have torch.compile write calls of `fn` into its graphs, as they are."""
    # `torch.compiler.allow_in_graph` does so, too, but where a backend then refuses the graph,
    # dynamo raises in place of breaking it.
    from torch._dynamo import trace_rules, variables

    trace_rules.get_torch_obj_rule_map()[fn] = variables.TorchInGraphFunctionVariable


_rules: ContextVar[str] = ContextVar("rules", default="")  # as torch keeps its settings


def compile_by(rules: str) -> None:
    """Have what this thread compiles keep our rules, and torch's caches on disk tell them apart."""
    # torch traces a backward pass in the region around its forward pass, which would cast again
    # what a policy keeps wide. It finds graphs of other processes by the autocast state, in which a
    # policy is a code that holds for one process. What the user has set stays.
    import torch.compiler.config as caches

    before = _rules.get()
    if rules == before and caches.cache_key_tag.endswith(rules):  # else the user has set it since
        return
    import torch._functorch.config as backward

    if not before and backward.backward_pass_autocast == "same_as_forward":
        backward.backward_pass_autocast = "off"
    caches.cache_key_tag = caches.cache_key_tag.removesuffix(before) + rules
    _rules.set(rules)


no_frame(compile_by, inside=True)


def after_tracing(undo: Callable[[], object]) -> None:
    """If dynamo is tracing in this thread, have it call `undo` when it is done or has given up."""
    # Dynamo's own handlers of the autocast setters do the same, but in torch 2.13 they fail in the
    # bodies of higher-order ops (autograd functions, checkpoint).
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    translator = getattr(convert and convert.tls, "current_tx", None)
    if translator is not None:
        translator.output.add_cleanup_hook(undo)


def stays(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor as one whose address compiled code may rely on."""
    # `torch._dynamo.mark_static_address(tensor, guard=True)` does the same, but imports dynamo.
    # CUDA graphs of `mode="reduce-overhead"` write to no other inputs.
    tensor._dynamo_static_input_type = "guarded"  # type: ignore[attr-defined]
    return tensor


# torch.export: the modes that record regions and ops, and contexts without them.


def export_modes() -> list[Any]:
    """Return the function modes with which torch.export traces, non-strictly; [] at other times."""
    # Export notes entering and leaving a region through them: torch's own autocast class calls
    # `mode.__torch_function__(torch.amp._enter_autocast, (), state)`.
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
    """Return the table, by op, that a recording mode asks first; inner graphs inherit it."""
    # Since torch 2.13 the mode has it, before that its module, in 2.12 as a context variable.
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


@contextmanager
def trial() -> Iterator[None]:
    """A context for ops that are not run again: torch.export learns nothing of sizes, either."""
    from torch._guards import detect_fake_mode

    fake: Any = detect_fake_mode()
    sizes = fake.shape_env
    with unrecorded(), sizes.ignore_fresh_unbacked_symbols(), sizes.suppress_guards():
        yield


def without_recorder() -> Any:
    """Return a context without the mode by which torch.export records regions."""
    from torch.fx.experimental import proxy_tensor

    return proxy_tensor._temp_remove_pre_dispatch_torch_function_mode()
