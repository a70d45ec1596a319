"""Traced programs: their types, as polymp reads them, and their parts.

Not all of these are objects of jax's own: a call of a known function that is taken as one op has
the same attributes as an equation, and as the program inside it.
"""

from collections.abc import Sequence
from types import FunctionType
from typing import Any, Protocol, TypeAlias

import jax
import jax._src.core as _core
import jax._src.interpreters.partial_eval as _partial_eval
import jax._src.source_info_util as _source_info
import jax.extend.core as core
import numpy as np

JaxprEqnContext: TypeAlias = _core.JaxprEqnContext
NameStack: TypeAlias = _source_info.NameStack
SourceInfo: TypeAlias = _source_info.SourceInfo


class Atom(Protocol):
    """A variable of a program, or a number in it."""

    @property
    def aval(self) -> Any:
        """Its type: that of an array, a token or a reference."""


class Equation(Protocol):
    """An equation: a primitive, what it reads and what it writes. As `jax.extend.core.JaxprEqn`."""

    @property
    def primitive(self) -> core.Primitive: ...
    @property
    def invars(self) -> Sequence[Atom]: ...
    @property
    def outvars(self) -> Sequence[Atom]: ...
    @property
    def params(self) -> jax.core.ParamDict: ...
    @property
    def effects(self) -> core.Effects: ...
    @property
    def source_info(self) -> SourceInfo: ...
    @property
    def ctx(self) -> JaxprEqnContext: ...


class OpenProgram(Protocol):
    """A program without the values of its constants. As `jax.extend.core.Jaxpr`."""

    @property
    def invars(self) -> Sequence[Atom]: ...
    @property
    def constvars(self) -> Sequence[Atom]: ...
    @property
    def outvars(self) -> Sequence[Atom]: ...
    @property
    def eqns(self) -> Sequence[Equation]: ...
    @property
    def debug_info(self) -> core.DebugInfo: ...


class ClosedProgram(Protocol):
    """A program with the values of its constants. As `jax.extend.core.ClosedJaxpr`."""

    @property
    def jaxpr(self) -> OpenProgram: ...
    @property
    def consts(self) -> Sequence[Any]: ...


def opened(closed: ClosedProgram) -> tuple[OpenProgram, Sequence[Any]]:
    """The jaxpr and the constants of a closed jaxpr. Since jax 0.11 the two kinds are one class."""
    return closed.jaxpr, closed.consts


def close(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.ClosedJaxpr:
    """A jaxpr without constants, as a closed one: the same each time. Since jax 0.4."""
    return jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else _partial_eval.close_jaxpr(jaxpr)


def binders(closed: ClosedProgram) -> tuple[Sequence[Atom], Sequence[Atom]]:
    """The variables of the constants and those of the arguments of a closed jaxpr."""
    jaxpr, consts = opened(closed)
    invars = getattr(jaxpr, "all_invars", None) or [*jaxpr.constvars, *jaxpr.invars]  # 0.11: one
    return invars[: len(consts)], invars[len(consts) :]


def lifted(closed: ClosedProgram) -> tuple[OpenProgram, Sequence[Any]]:
    """The open jaxpr that takes the constants as leading arguments, and the constants."""
    jaxpr, consts = opened(closed)
    if not consts:
        return jaxpr, ()
    constvars, invars = binders(closed)
    whole: Any = jaxpr

    def evaluate(*args: jax.Array) -> Sequence[jax.Array]:
        again = core.ClosedJaxpr(whole, list(args[: len(consts)]))
        outs: Sequence[jax.Array] = core.jaxpr_as_fun(again)(*args[len(consts) :])
        return outs

    traced = jax.make_jaxpr(evaluate)(*(var.aval for var in (*constvars, *invars)))
    return opened(traced)[0], consts


def scan_sizes(params: jax.core.ParamDict) -> tuple[int, int]:
    """How many constants and how many carries a scan has. Since jax 0.11 held by a flat tree."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def only_arrays(closed: ClosedProgram) -> bool:
    """True if a jaxpr takes and returns arrays alone: no references, tokens or boxes."""
    jaxpr, _ = opened(closed)
    return all(type(v.aval) is _core.ShapedArray for v in (*binders(closed)[1], *jaxpr.outvars))


def has_program(params: jax.core.ParamDict) -> bool:
    """True if an equation's parameters hold a jaxpr or a function."""
    if any(True for _ in core.jaxprs_in_params(params)):
        return True
    return any(callable(value) and hasattr(value, "call_wrapped") for value in params.values())


def dtypes_out(eqn: Equation, dtypes: Sequence[str | None]) -> tuple[str | None, ...]:
    """The dtypes of an equation's results if its operands had these; None: as declared.

    Asks the primitive's own shape rule, `abstract_eval`. Since jax 0.4.
    """
    avals = [
        var.aval if dtype is None else var.aval.update(dtype=np.dtype(dtype), weak_type=False)
        for var, dtype in zip(eqn.invars, dtypes, strict=True)
    ]
    out, _ = eqn.primitive.abstract_eval(*avals, **eqn.params)
    outs = out if eqn.primitive.multiple_results else [out]
    return tuple(aval.dtype.name if hasattr(aval, "dtype") else None for aval in outs)


def traced_from(closed: ClosedProgram) -> tuple[str | None, int | None, str]:
    """File, first line and name of the function that a jaxpr was traced from. Since jax 0.5."""
    info = opened(closed)[0].debug_info
    return info.func_filename, info.func_lineno, info.func_name


def traced_as(fn: Any, closed: ClosedProgram) -> Any:
    """A Python function that does the same; what is traced of it says it is of a jaxpr's function.

    A jaxpr's debug information comes of the code object of a function. Since jax 0.5.
    """
    filename, line, name = traced_from(closed)
    code = fn.__code__
    if filename is not None:
        code = code.replace(co_filename=filename, co_firstlineno=line or 1, co_name=name)
    return FunctionType(code, fn.__globals__, name, fn.__defaults__, fn.__closure__)


def traced_jaxpr(traced: Any) -> core.ClosedJaxpr:
    """The closed jaxpr of what `trace` of a jitted function returns.

    That of `flax.nnx.jit` holds jax's own. Since flax 0.12.
    """
    jaxpr: core.ClosedJaxpr = getattr(traced, "traced", traced).jaxpr
    return jaxpr
