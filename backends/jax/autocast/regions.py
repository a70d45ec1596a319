"""Regions of traced code: the ambient one, and the mark that a region leaves on every equation.

`AMBIENT` holds the region in which Python runs. It is part of the key of every jit cache, so a
function that was traced outside a region is traced again inside one. A mark is a name scope; it
survives grad, vmap, scan and remat on the equations that were traced under it, which is how the
rewrite knows the region of each. Nothing here casts.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import jax

from polymp.backends.jax import compat
from polymp.backends.jax.compat import NameStack
from polymp.rules import decision_log
from polymp.rules.policy import Policy, Region
from polymp.rules.row import Row, Rule

AMBIENT: compat.Context[Region | None] = jax.make_user_context(None)

# The number of the explanation that is being made. What is traced for one serves no other.
EXPLAINED: compat.Context[int | None] = jax.make_user_context(None)

# Inside a function that a row names, nothing else is asked; what it adds up low is rounded once.
_SUMS = [Row(f"jax:{name}", Rule.FP32_KEEP) for name in ("scatter-add", "scatter-sub")]
AS_CALLED = Policy("the rule of the call", tuple(_SUMS))

# The name scope of what became of an equation, with its number, where calls are followed.
CALL = "polymp:call:"

# The name scope in which a loss scaler multiplies; what is differentiated keeps it.
SCALED = "polymp:scale"


# Regions by mark and marks by region, for the life of the process: a jaxpr may outlive any.
_REGIONS: dict[str, Region] = {}
_MARKS: dict[Region, str] = {}
_LOCK = threading.Lock()


def _mark(region: Region) -> str:
    with _LOCK:
        if region not in _MARKS:
            plain = f"polymp:{region.dtype if region.enabled else 'off'}"
            taken = sum(name.split("-")[0] == plain for name in _REGIONS)
            name = f"{plain}-{taken}" if taken else plain
            _MARKS[region], _REGIONS[name] = name, region
        return _MARKS[region]


def is_inside() -> bool:
    """True where an autocast function is traced, whether its region is enabled or not."""
    return AMBIENT.value is not None


@contextmanager
def entered(region: Region) -> Iterator[None]:
    """Run Python in the region, and mark what is traced meanwhile."""
    with AMBIENT(region), jax.named_scope(_mark(region)):
        yield


@contextmanager
def as_written() -> Iterator[None]:
    """Run Python, or as a decorator a function, outside of any region: as it is written."""
    ambient = AMBIENT.value
    with nullcontext() if ambient is None else entered(replace(ambient, enabled=False)):
        yield


class _Open(threading.local):
    """The regions that `with` has opened in this thread, oldest first."""

    def __init__(self) -> None:
        self.scopes: list[AbstractContextManager[None]] = []


_OPEN = _Open()


def enter(region: Region) -> None:
    """Open a region; `leave` closes the one that was opened last in this thread."""
    scope = entered(region)
    scope.__enter__()
    _OPEN.scopes.append(scope)


def leave() -> None:
    """Close the region that was opened last in this thread."""
    _OPEN.scopes.pop().__exit__(None, None, None)


def innermost(stack: NameStack) -> Region | None:
    """The region of an equation: that of the last mark on its name stack; None without a mark."""
    marks = list(filter(is_mark, compat.scope_names(stack)))
    return _REGIONS[marks[-1]] if marks else None


def is_mark(name: str) -> bool:
    """True for the name of a scope that `entered` opened."""
    return name in _REGIONS


def is_module(name: str) -> bool:
    """True for the name of a scope that is a part of module paths."""
    return not _NO_MODULE.match(name)


# Ours; jax.checkpoint's; those of jax.numpy, "ij,jk->ik", and of functions without a name.
_NO_MODULE = re.compile(r"polymp:|rematted_computation$|.*[,<>]")


def module_path(*scopes: str) -> str:
    """The path of modules that the names of scopes are, for patterns and for reports."""
    # Without those that equinox opens in its layers, "eqx.nn.Linear", if others have the path.
    path = ".".join(filter(None, scopes)).replace("/", ".")
    return _OF_EQUINOX.sub("", path).removeprefix(".") or path


_OF_EQUINOX = re.compile(r"(?:^|\.)eqx\.nn\.\w+")


# A name stack, the region of its last mark, the stack without marks, and its path of modules.
_Read = tuple[NameStack, Region | None, NameStack, str]


class NameStacks:
    """Reads the name stacks of equations, each once."""

    def __init__(self) -> None:
        self._read: dict[int, _Read] = {}
        self._scoped: dict[tuple[Region, str], Region] = {}

    def place(self, stack: NameStack, outer: Region) -> tuple[Region, NameStack]:
        """The region of a name stack inside a region, and the stack without our marks."""
        _, marked, plain, path = self._read.get(id(stack)) or self._looked_at(stack)
        if outer.policy is AS_CALLED:  # the op around it decides for all inside
            return outer, plain
        region = marked or outer
        if (record := decision_log.current()) is not None and record.instead and region.policy:
            region = replace(region, policy=record.instead(region.policy))
        if region.policy is None or not region.policy.scopes:
            return region, plain
        scope = module_path(outer.scope, path)
        if (region, scope) not in self._scoped:
            self._scoped[region, scope] = replace(region, scope=scope)
        return self._scoped[region, scope], plain

    def path(self, stack: NameStack) -> str:
        """The scopes of a name stack as a path of modules."""
        return (self._read.get(id(stack)) or self._looked_at(stack))[3]

    def _looked_at(self, stack: NameStack) -> _Read:
        marked = innermost(stack)
        plain = stack if marked is None else compat.without_scopes(stack, is_mark)
        path = ".".join(filter(is_module, compat.scope_names(plain)))
        found = self._read[id(stack)] = stack, marked, plain, path
        return found
