"""Where equations and values come from: name stacks, tracebacks, and the traces around."""

from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

import jax
import jax._src.core as _core
import jax._src.source_info_util as _source_info
from jax.core import Tracer

from polymp.backends.jax.compat.programs import Equation, NameStack


def without_scopes(stack: NameStack, drop: Callable[[str], bool]) -> NameStack:
    """A name stack without the scopes whose names are to be dropped. Since jax 0.4."""
    kept = [part for part in stack.stack if not (hasattr(part, "name") and drop(part.name))]
    return type(stack)(tuple(kept))


def no_scopes() -> NameStack:
    """The empty name stack. Since jax 0.4."""
    return _source_info.NameStack()


def scope_names(stack: NameStack) -> list[str]:
    """The names of a stack's scopes, outermost first, without the transforms. Since jax 0.4."""
    return [part.name for part in stack.stack if type(part).__name__ == "Scope"]


def with_scope(stack: NameStack, name: str) -> NameStack:
    """A name stack with one scope more, inside the others. Since jax 0.4."""
    return stack.extend(name)


def transforms(stack: NameStack) -> frozenset[str]:
    """Names of the transforms in a name stack: "jvp", "transpose", "vmap". Since jax 0.4."""
    return frozenset(p.name for p in stack.stack if type(p).__name__ == "Transform")


def in_backward(stack: NameStack) -> bool:
    """True for the name stack of an equation that a transposition made. Since jax 0.4."""
    return "transpose" in transforms(stack)


class Frames(NamedTuple):
    """The Python frames of a traceback, innermost first.

    Attributes:
        codes: the code object of each.
        places: where in it the frame was: offsets of instructions.
    """

    codes: Sequence[CodeType]
    places: Sequence[int]


def frames(traceback: Any) -> Frames:
    """The frames of an equation's traceback, cheaply. `raw_frames` since jaxlib 0.4."""
    return Frames((), ()) if traceback is None else Frames(*traceback.raw_frames())


def where_written(eqn: Equation) -> str:
    """File, line and function of an equation, as its author would look for it. Since jax 0.3."""
    return _source_info.summarize(eqn.source_info)


def traces() -> list[jax.core.Trace]:
    """The traces that Python runs under, innermost first, without the last: that of no trace.

    Empty in code that is not traced. Since jax 0.4.36.
    """
    found = []
    trace = _core.trace_ctx.trace
    while trace is not None and trace is not _core.eval_trace:
        found.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return found


def tracers_of(trace: jax.core.Trace | None, among: Sequence[object]) -> "list[Tracer[Any]]":
    """Those of some objects that are values of a trace. Since jax 0.4.36."""
    return [x for x in among if isinstance(x, _core.Tracer) and x._trace is trace]


def operands_of(tracer: "Tracer[Any]") -> object:
    """The list of values that a value was computed from; None if there is none. Since jax 0.7."""
    eqn = getattr(tracer, "parent", None)
    return None if eqn is None else eqn.in_tracers


def where_made(tracer: "Tracer[Any]") -> str:
    """Type of a traced value, and where it was computed. Since jax 0.4.36."""
    shown, info = tracer.aval.str_short(), tracer._line_info
    place = _source_info.summarize(info) if info is not None else ""
    return f"{shown} from {place}" if place else str(shown)
