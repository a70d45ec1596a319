"""Runs every row of `ops` under torch.autocast and under polymp.

In: a device and a path. Out: a pickled `Record` for each of `STAGES`. `main` has a process of its
own so that torch's outcomes come first, before polymp is imported, and so that polymp's compiled
engine is seen before a kernel of ours is installed beside it; kernels stay installed for ever.
"""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.sizes import LONG
from tests.support.torch import ops, outcomes
from tests.support.torch.ops import Row
from tests.support.torch.outcomes import Enter, Listed, Outcome, fake, on_cuda, on_data, torch_cuda

LOW = (torch.bfloat16, torch.float16)
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}

# Who runs the ops, in this order; the last three with few patterns only.
STAGES = {
    "torch": "torch.autocast in a process without polymp",
    "native": "polymp, on the compiled kernels",
    "python": "polymp, every op on our kernels",
    "handed back": "polymp, our kernels installed but handing over to the compiled ones",
    "bystander": "torch.autocast beside our installed kernels",
    "wrong": "polymp under a policy that is wrong on purpose for every op",
}

FEW = ("all float32", "all bfloat16", "all float16", "low, then float32")

# How a call is made, besides the dtype pattern; the first way goes with every pattern.
WAYS = {
    "cpu": {
        "": "gradients taken outside the region",
        "no gradients": "no tensor requires any",
        "gradients inside": "gradients taken inside the region",
        "twice": "two calls on the same leaves: the second one meets the casts that are kept",
    },
    "cuda": {
        "": "inference mode: composite ops arrive at the recorder whole, right below autocast",
        "plain": "no inference mode: composite ops arrive in parts",
    },
}


class Case(NamedTuple):
    """One call: which op (or torch's own list), which of its rows, how, in which region."""

    op: str
    row: int
    way: str
    low: str


Record = dict[Case, Outcome]
EnterIn = Callable[[torch.dtype], AbstractContextManager[Any]]


@cache
def registered(device: str) -> list[str]:
    """Ops with an autocast kernel; ask before polymp adds its own to them."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(KEYS[device])
    return sorted(name.removeprefix("aten::") for name in names)


def rows(op: str) -> list[Row]:
    return [row for row in ops.ROWS if row.op == op]


def record(device: str, enter: EnterIn, patterns: Sequence[str] = tuple(ops.PATTERNS)) -> Record:
    """The outcomes of all rows of the device's ops in the regions that `enter` opens."""
    found: Record = {}
    for turn, low in enumerate(LOW):
        here = partial(enter, low)
        name = str(low).removeprefix("torch.")
        for index, op in enumerate(registered(device)):
            some = part(patterns, 2 * index + turn)
            ways = part_of_ways(device, index + turn) if LONG or patterns is not FEW else ()
            for at, row in enumerate(rows(op)):
                run = partial(_RUN[device], row)
                for pattern, dtypes, way in variations(ways, row, low, some):
                    found[Case(op, at, pattern, name)] = run(dtypes, way, here)
        for listed in outcomes.listed(device):
            found[Case(listed.title, 0, "as listed", name)] = _LISTED[device](listed, here)
    return found


def part(patterns: Sequence[str], index: int) -> Sequence[str]:
    """All of them in `make test-long`; in `make test` some in turn, in bfloat16 float32 first."""
    if LONG:
        return patterns
    first, *few = FEW
    others = [name for name in patterns if name not in FEW]
    chosen = {few[index % 3] if index % 2 else first, *others[index % 12 :: 12]}
    return [name for name in patterns if name in chosen]


def part_of_ways(device: str, index: int) -> Sequence[tuple[int, str]]:
    """The other ways: all in `make test-long`; in `make test` one in turn, or none."""
    ways = [*enumerate(way for way in WAYS[device] if way)]
    at = index % max(len(ways), 2)  # the only one of CUDA in one of the two region dtypes
    return ways if LONG else ways[at : at + 1]


def variations(
    ways: Sequence[tuple[int, str]], row: Row, low: torch.dtype, patterns: Sequence[str]
) -> Iterator[tuple[str, list[torch.dtype], str]]:
    """Name, dtype pattern and way of every call of a row; patterns equal for the row come once."""
    seen = set()
    count = ops.floats(row)
    for name in patterns:
        pattern = ops.dtypes(ops.PATTERNS[name], low)
        taken = tuple(pattern[min(at, len(pattern) - 1)] for at in range(count))
        if taken not in seen:
            seen.add(taken)
            yield name, pattern, ""
    both = "all float32", "low, then float32"
    for at, way in ways:
        for name in both if LONG else both[at % 2 :][:1]:
            yield f"{name} ({way})", ops.dtypes(ops.PATTERNS[name], low), way


def run_cpu(row: Row, pattern: list[torch.dtype], way: str, enter: Enter) -> Outcome:
    (args, kwargs), leaves = ops.arguments(row, pattern)
    count = len(row.overload._schema.returns)
    wanted = range(count) if row.outputs is None else row.outputs
    times = 2 if way == "twice" else 1
    return on_data(
        lambda: [out for _ in range(times) for out in tree_leaves(row.overload(*args, **kwargs))],
        [] if way == "no gradients" else [leaf.requires_grad_() for leaf in leaves],
        enter,
        differentiable=lambda at: at % count in wanted,
        scratch=lambda at: at % count in row.scratch,
        inside=way == "gradients inside",
    )


def run_cuda(row: Row, pattern: list[torch.dtype], way: str, enter: Enter) -> Outcome:
    args, kwargs = _fake_call(row, tuple(pattern))
    return on_cuda(lambda: row.overload(*args, **kwargs), enter, inference=way != "plain")


@cache  # making fake tensors takes as long as calling ops on them, and no op writes to its inputs
def _fake_call(row: Row, pattern: tuple[torch.dtype, ...]) -> ops.Call:
    place, stay = partial(fake, device="cuda"), partial(fake, device="cpu")
    return ops.arguments(row, pattern, place, stay)[0]


_RUN = {"cpu": run_cpu, "cuda": run_cuda}


def _listed_cpu(listed: Listed, enter: Enter) -> Outcome:
    leaves: list[torch.Tensor] = []

    def fresh(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
            # One leaf is enough, and the first argument always has a derivative.
            if value.is_floating_point() and not leaves:
                leaves.append(value.requires_grad_())
        return value

    args, kwargs = tree_map(fresh, (listed.args, listed.kwargs))
    return on_data(lambda: tree_leaves(listed.function(*args, **kwargs)), leaves, enter)


def _listed_cuda(listed: Listed, enter: Enter) -> Outcome:
    return on_cuda(lambda: listed.function(*listed.args, **listed.kwargs), enter)


_LISTED = {"cpu": _listed_cpu, "cuda": _listed_cuda}


def wrong_policy(device: str) -> Any:
    from dataclasses import replace

    from polymp.rules import policy_files
    from polymp.rules import row as rules

    right = policy_files.load(f"torch-{device}")
    other = {
        rules.Rule.LOWER: rules.Rule.FP32,
        rules.Rule.FP32: rules.Rule.LOWER,
        rules.Rule.WIDEST: rules.Rule.LOWER,
        rules.Rule.FORBID: rules.Rule.KEEP,
        rules.Rule.PARTS: rules.Rule.PARTS,  # an overload that torch does not register
    }
    wrong = [rules.Row(row.of, other[row.rule]) for row in right.rows]
    return replace(right, name=f"wrong-{device}", rows=tuple(wrong))


def main(device: str, path: str) -> None:
    logging.disable(logging.CRITICAL)  # torch logs every failing fake call at length
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other
    theirs: EnterIn = {"cpu": partial(torch.autocast, "cpu"), "cuda": torch_cuda}[device]
    records = {"torch": record(device, theirs)}
    assert "polymp" not in sys.modules, "torch's outcomes are to be torch's own"

    from polymp.backends.torch.autocast import kernel_registry
    from polymp.torch import autocast
    from tests.support.torch.each_op import inside
    from tests.support.torch.kernels import all_python

    def ours(low: torch.dtype, policy: Any = None) -> AbstractContextManager[Any]:
        """A polymp region; `autocast` itself disables one for CUDA without a GPU, as torch does."""
        if device == "cpu":
            return autocast("cpu", low, policy=policy)
        return inside("cuda", str(low).removeprefix("torch."), policy=policy)

    records["native"] = record(device, ours)
    assert kernel_registry.installed(device) == (), "the compiled engine is to be seen alone"
    with all_python(device):
        ours_too = {*kernel_registry.installed(device), *ops.EXCUSED[device]}
        assert set(registered(device)) <= ours_too, "ops not on our kernels"
        records["python"] = record(device, ours)
    records["handed back"] = record(device, ours, FEW)
    records["bystander"] = record(device, theirs, FEW)
    records["wrong"] = record(device, partial(ours, policy=wrong_policy(device)), FEW)
    assert list(records) == list(STAGES)
    Path(path).write_bytes(pickle.dumps((registered(device), records)))
