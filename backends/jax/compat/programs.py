"""Types of traced programs, as polymp reads them.

Not all of these are objects of jax's own: a call of a known function that is taken as one op has
the same attributes as an equation, and as the program inside it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from jax._src.core import JaxprEqnContext as JaxprEqnContext
from jax._src.source_info_util import NameStack as NameStack
from jax._src.source_info_util import SourceInfo as SourceInfo
from jax.core import ParamDict
from jax.extend.core import DebugInfo, Effects, Primitive


class Atom(Protocol):
    """A variable of a program, or a number in it."""

    @property
    def aval(self) -> Any:
        """Its type: that of an array, a token or a reference."""


class Equation(Protocol):
    """An equation: a primitive, what it reads and what it writes. As `jax.extend.core.JaxprEqn`."""

    @property
    def primitive(self) -> Primitive: ...
    @property
    def invars(self) -> Sequence[Atom]: ...
    @property
    def outvars(self) -> Sequence[Atom]: ...
    @property
    def params(self) -> ParamDict: ...
    @property
    def effects(self) -> Effects: ...
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
    def debug_info(self) -> DebugInfo: ...


class ClosedProgram(Protocol):
    """A program with the values of its constants. As `jax.extend.core.ClosedJaxpr`."""

    @property
    def jaxpr(self) -> OpenProgram: ...
    @property
    def consts(self) -> Sequence[Any]: ...
