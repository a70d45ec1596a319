"""Equal layers folded into one: 24 blocks of a model become `layers.*`, with the sums of all.

    rows, each of a module -> modules with their rows -> equal neighbours added up

All that shows rows by module folds them here: reports, audits, differences and the picture. Two
modules are equal if their paths differ in one number alone, and if they have equal rows in the same
order. Only neighbours are folded, so that an odd layer stays where it is:

    layers.0.attn ... layers.23.attn        layers.*.attn x24
    the same, with another layers.7.attn    layers.0-6.attn x7, layers.7.attn, layers.8-23.attn x16

Nothing here knows what a row is.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

R = TypeVar("R")

# Every layer of a model, in a path, as in the patterns of policies.
ALL = "*"
_NUMBERED = re.compile(r"(|.*_)(\d+)")  # flax's linen writes layers_0
_FOLDED = re.compile(r"(|.*_)(?:\d[\d,-]*|\*)")  # a number, or what it became


class ModuleRows(NamedTuple, Generic[R]):
    """The rows of a module, or those of equal modules, added up.

    Attributes:
        section: of a table that the rows are in, such as "forward".
        module: its path; of several, with `*` or a range of numbers: "layers.0-6.attn".
        layers: how many modules these are.
        rows: in order.
    """

    section: str
    module: str
    layers: int
    rows: tuple[R, ...]


def folded(
    rows: Iterable[R],
    place: Callable[[R], tuple[str, str]],
    kind: Callable[[R], Hashable],
    added: Callable[[Sequence[R]], R],
    fold: bool = True,
) -> list[ModuleRows[R]]:
    """Return rows by section and module, equal modules as one."""
    grouped: dict[tuple[str, str], list[R]] = {}
    for row in rows:
        grouped.setdefault(place(row), []).append(row)
    found = [ModuleRows(*at, 1, tuple(many)) for at, many in grouped.items()]
    if not fold:
        return found
    numbers = _numbers(module for _, module in grouped)
    for at in range(max((m.module.count(".") + 1 for m in found), default=0)):
        found = _folded_at(at, found, kind, added, numbers)
    return found


def label(one: ModuleRows[R], outside: str) -> str:
    """The name of a module in a table: "layers.*.attn x24"."""
    return (one.module or outside) + (f" x{one.layers}" if one.layers > 1 else "")


def _numbers(modules: Iterable[str]) -> dict[tuple[str, ...], set[int]]:
    """The numbers of all layers, by the path up to them."""
    found: dict[tuple[str, ...], set[int]] = {}
    for module in modules:
        parts = module.split(".")
        for at, part in enumerate(parts):
            if number := _NUMBERED.fullmatch(part):
                found.setdefault(_masked(parts[: at + 1]), set()).add(int(number[2]))
    return found


def _masked(parts: Sequence[str]) -> tuple[str, ...]:
    """The parts of a path; numbers and ranges as `*`."""
    found = ((part, _FOLDED.fullmatch(part)) for part in parts)
    return tuple(f"{match[1]}{ALL}" if match else part for part, match in found)


def _folded_at(
    at: int,
    found: list[ModuleRows[R]],
    kind: Callable[[R], Hashable],
    added: Callable[[Sequence[R]], R],
    numbers: dict[tuple[str, ...], set[int]],
) -> list[ModuleRows[R]]:
    """Fold the modules whose paths differ in the number at one place."""
    groups: dict[tuple[object, ...], dict[int, int]] = {}  # places in `found`, by number
    for index, one in enumerate(found):
        parts = one.module.split(".")
        if number := _NUMBERED.fullmatch(parts[at]) if at < len(parts) else None:
            key = one.section, one.layers, *parts[:at], None, number[1], *parts[at + 1 :]
            groups.setdefault(key, {})[int(number[2])] = index
    made: dict[int, ModuleRows[R]] = dict(enumerate(found))
    for group in groups.values():
        for run in _runs({n: tuple(map(kind, found[i].rows)) for n, i in group.items()}):
            if len(run) > 1:
                members = [found[group[n]] for n in run]
                for n in run:
                    del made[group[n]]
                made[min(group[n] for n in run)] = _added(members, at, run, added, numbers)
    return [made[index] for index in sorted(made)]


def _runs(kinds: dict[int, Hashable]) -> list[list[int]]:
    """The numbers in order, neighbours of one kind together."""
    runs: list[list[int]] = []
    for number in sorted(kinds):
        if runs and kinds[runs[-1][-1]] == kinds[number]:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _added(
    members: Sequence[ModuleRows[R]],
    at: int,
    run: Sequence[int],
    added: Callable[[Sequence[R]], R],
    numbers: dict[tuple[str, ...], set[int]],
) -> ModuleRows[R]:
    parts = members[0].module.split(".")
    everywhere = numbers[_masked(parts[: at + 1])] == {*run}
    name = parts[at].rstrip("0123456789")
    parts[at] = name + (ALL if everywhere else _ranges(run))
    rows = tuple(added(many) for many in zip(*(m.rows for m in members), strict=True))
    layers = sum(member.layers for member in members)
    return ModuleRows(members[0].section, ".".join(parts), layers, rows)


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in short: "0-4,6"."""
    ends: list[list[int]] = []
    for number in numbers:
        if ends and ends[-1][1] == number - 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ends)
