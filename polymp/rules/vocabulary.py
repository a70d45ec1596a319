"""The vocabulary: one name of ours for every op, and how each framework spells it.

`vocabulary()` reads `policies/vocabulary.toml` once; `register` adds an op of the user's own.
Policies are written in these names; the torch backend looks aten overloads
up in them, the jax backend primitives and functions. Nothing here imports a framework.
"""

import difflib
import threading
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from polymp.errors import PolicyError

# The class of ops that users register without saying one.
CUSTOM = "custom"

# What `policies/vocabulary.toml` may say of a class besides its summary.
CLASS_TRAITS = ("moves", "products", "sums", "parameters", "wide")


@dataclass(frozen=True, slots=True)
class Op:
    """One op and its spellings."""

    name: str  # ours; torch's documented name where there is one
    kind: str  # its class, such as "matmul"
    # Functional aten overloads, "mm" or "softmax.int"; those of a registered op with their
    # namespace, "mylib::my_op".
    aten: tuple[str, ...] = ()
    jax: tuple[str, ...] = ()  # JAX primitives, some with a variant: "dot_general:unbatched"
    functions: tuple[str, ...] = ()  # public functions of jax and libraries on it, by dotted name
    # Without primitive and function, the ops that it becomes in a JAX trace.
    traces: tuple[str, ...] = ()
    note: str = ""  # why a side is empty
    rule: str = ""  # of a registered op, how it runs under a policy that has no row for it
    # True if it picks numbers and changes none: run low, what it picked is rounded.
    picks: bool = False
    chooses: bool = False  # True if each of its results is one of the numbers that it is given
    # Aten ops that torch runs for it below autograd, without overloads.
    kernels: tuple[str, ...] = ()


_UNKNOWN = Op("", "")
# The fields of `Op` with spellings, and the word for one of these.
_SPELLINGS = {"aten": "aten op", "kernels": "kernel", "jax": "primitive", "functions": "function"}


class Vocabulary:
    """All ops, by each of their names."""

    def __init__(
        self,
        kinds: Mapping[str, str],
        ops: Iterable[Op],
        traits: Mapping[str, frozenset[str]] = MappingProxyType({}),
    ) -> None:
        self.kinds: dict[str, str] = dict(kinds)  # the classes, with a sentence on each
        self.traits = traits  # by trait, the classes that have it; see `policies/vocabulary.toml`
        # Classes that compute nothing: their ops move, pick or compare numbers.
        self.moving: frozenset[str] = traits.get("moves", frozenset())
        self.ops: dict[str, Op] = {}  # by our name
        self.registered: list[str] = []  # names of ops that were added, in order
        # Our names by spelling; by the field of `Op` that has them.
        self._names: dict[str, dict[str, str]] = {field: {} for field in _SPELLINGS}
        self._lock = threading.Lock()
        for op in ops:
            self._add(op)

    def _add(self, op: Op) -> None:
        known = self.ops.get(op.name)
        if known is not None and not _completes(op, known):
            raise PolicyError(
                f"the vocabulary has an op {op.name!r} already. Register yours by another name, or "
                "give that op a rule in a policy."
            )
        spellings = {field: getattr(op, field) for field in _SPELLINGS}
        for field, what in _SPELLINGS.items():
            for name in spellings[field]:
                if owner := self._names[field].get(name):
                    raise PolicyError(_taken(what, name, f", as {owner!r}", op.name))
        for field, names in spellings.items():
            self._names[field].update(dict.fromkeys(names, op.name))
        if known is not None:
            both = {field: getattr(known, field) + names for field, names in spellings.items()}
            op = replace(known, **both)
        self.ops[op.name] = op

    def register(self, op: Op) -> None:
        """Add an op of the user's own, or the other framework's spelling of one."""
        with self._lock:
            self._add(op)
            self.kinds.setdefault(op.kind, "Ops that users registered.")
            self.registered.append(op.name)

    def of_aten(self, overload: str) -> str:
        """Our name of an aten overload, "" if it has none."""
        return self._names["aten"].get(overload, "")

    def of_kernel(self, kernel: str) -> str:
        """Our name of an aten op that torch runs below autograd, "" if it has none."""
        return self._names["kernels"].get(kernel, "")

    def of_jax(self, primitive: str) -> str:
        """Our name of a primitive, with or without a variant, "" if it has none."""
        return self._names["jax"].get(primitive, "")

    def knows(self, name: str) -> bool:
        """True of an op's name and of a spelling of one, without a prefix."""
        return name in self.ops or any(name in names for names in self._names.values())

    @property
    def functions(self) -> Mapping[str, str]:
        """Our names by the dotted name of a function."""
        return self._names["functions"]

    def members(self, kind: str) -> tuple[Op, ...]:
        """The ops of a class, by name."""
        return tuple(op for _, op in sorted(self.ops.items()) if op.kind == kind)

    def op(self, name: str) -> Op:
        """The op of a name; of an unknown one an op without class and traits."""
        return self.ops.get(name, _UNKNOWN)

    def within(self, inner: str, outer: str) -> bool:
        """True if every op that selector `inner` selects is selected by `outer` too."""
        # A spelling is within its op, an op within its class, each within itself, and everything
        # within "all". Within "default", which is for ops that have no other row, is nothing else.
        if outer in (inner, "all"):
            return True
        op = self.op_of(inner)
        if op is None:
            return False
        return outer == op.name or outer == f"class:{op.kind}"

    def op_of(self, selector: str) -> Op | None:
        """The op that a selector is, or is a spelling of; None for classes and unknown names."""
        prefix, colon, name = selector.partition(":")
        if not colon:
            return self.ops.get(selector)
        known = {"aten": self.of_aten, "jax": self.of_jax}.get(prefix)
        return self.ops.get(known(name)) if known else None

    def check(self, selector: str, where: str) -> None:
        """Refuse a selector that selects no op."""
        if not isinstance(selector, str):
            raise PolicyError(f"{where}: ops are named by strings, not {selector!r}.")
        prefix, colon, name = selector.partition(":")
        if name and prefix in ("aten", "jax"):  # whether they have such a name, a backend knows
            if name.startswith(":"):
                raise PolicyError(f"{where}: {selector!r}: write {prefix}:{name.lstrip(':')}.")
        elif colon and prefix == "class":
            if name not in self.kinds:
                raise PolicyError(
                    f"{where}: no class {name!r}.{nearest(name, self.kinds)} "
                    f"Classes: {', '.join(sorted(self.kinds))}."
                )
        elif colon:
            raise PolicyError(
                f"{where}: {selector!r} is not an op. Names with a colon are class:NAME, "
                "aten:OVERLOAD and jax:PRIMITIVE."
            )
        elif selector not in ("all", "default", *self.ops):
            raise PolicyError(f"{where}: no op {selector!r}.{self.hint(selector)}")

    def hint(self, name: str) -> str:
        """A sentence on the op that may have been meant by a name, or nothing."""
        if name in self.kinds:
            return f" The class is written class:{name}."
        spelled = self.of_aten(name) or self.of_jax(name)
        if spelled:
            side = "aten" if self.of_aten(name) else "jax"
            return f" It is a spelling of {spelled!r}; alone it is written {side}:{name}."
        base = name.partition(".")[0]
        if base in self.ops:
            return f" Did you mean {base}?"
        if base.endswith("_") and base.rstrip("_") in self.ops:
            return f" It writes into an argument, which keeps its dtype. The op is {base[:-1]}."
        return nearest(name, self.ops) or " `polymp show amp` lists the ops."


def _taken(what: str, name: str, owner: str, op: str) -> str:
    return (
        f"{what} {name!r} is in the vocabulary already{owner}: it cannot be registered as {op!r}. "
        "Give it a rule in a policy instead."
    )


def _completes(op: Op, known: Op) -> bool:
    """True if these are one registered op, as two frameworks spell it."""
    same = bool(known.rule) and (known.kind, known.rule) == (op.kind, op.rule)
    in_jax = [bool(one.jax or one.functions) for one in (op, known)]
    return same and bool(op.aten) != bool(known.aten) and in_jax[0] != in_jax[1]


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence with the names nearest to `name`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=3)
    return f" Did you mean {', '.join(close)}?" if close else ""


@cache
def vocabulary() -> Vocabulary:
    """The vocabulary of this process: the shipped one, and what was registered."""
    text = (resources.files("polymp.policies") / "vocabulary.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    kinds = {kind: entry["summary"] for kind, entry in data.items()}
    return Vocabulary(
        kinds,
        (
            _op(name, kind, own)
            for kind, entry in data.items()
            for name, own in entry["ops"].items()
        ),
        {
            trait: frozenset(kind for kind, entry in data.items() if entry.get(trait))
            for trait in CLASS_TRAITS
        },
    )


def _op(name: str, kind: str, entry: Mapping[str, Any]) -> Op:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    return Op(name, kind, **fields)
