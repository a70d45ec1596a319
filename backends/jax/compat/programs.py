"""Types of traced programs, as polymp reads them.

Not all of these are objects of jax's own: a call of a known function that is taken as one op has
the same attributes as an equation, and as the program inside it.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax._src.core as _core
import jax._src.source_info_util as _source_info
import jax.extend.core as core

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
