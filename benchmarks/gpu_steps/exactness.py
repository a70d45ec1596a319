"""Every autocast op on tensors of the GPU: polymp against torch.autocast, bit for bit.

Torch's own outcomes come first, twice, before polymp's torch backend is imported: what does not
repeat itself there is not held against polymp. Then polymp on torch's compiled kernels and on its
own. On CUDA the outcomes are also compared with those on fake tensors, which are all that the test
suite has without a GPU.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from pairing import machine
from torch.utils._pytree import tree_leaves

from gpu_steps.worker import Here
from tests.support.torch import ops, run_ops
from tests.support.torch.outcomes import Outcome, Seen, on_data
from tests.support.torch.run_ops import Case

Outcomes = dict[Case, Outcome]
Enter = Callable[[torch.dtype], AbstractContextManager[Any]]
SHOWN = 40  # rows of a table of differences


def compare(here: Here) -> dict[str, Any]:
    """The outcomes of all ops, in tables of what is the same and what is not."""
    if "polymp.torch" in sys.modules:
        raise RuntimeError("polymp.torch was imported before torch's own outcomes were taken")
    torch.backends.cudnn.deterministic = True
    names = run_ops.registered(here.device)
    chosen = names[::12] if here.small else names
    take = partial(outcomes, chosen, here.device)
    theirs: Enter = partial(torch.autocast, here.device)
    torchs, again = take(theirs), take(theirs)

    from polymp.torch import autocast
    from tests.support.torch.kernels import all_python

    ours: Enter = partial(autocast, here.device)
    found = {"compiled kernels": take(ours)}
    with all_python(here.device):
        found["kernels in Python"] = take(ours)
    summary, unlike = [], []
    for engine, outcome in found.items():
        line, different = against(torchs, again, outcome)
        summary.append({"polymp on": engine, "ops": len(chosen), **line})
        unlike += [{"polymp on": engine, **row} for row in different]
    lists = {"Ops on this device, against torch.autocast": summary, "Calls that differ": unlike}
    missing = {}
    if here.device == "cuda":
        lists |= fake_against(chosen, torchs)
    else:
        missing["fake tensors against real ones"] = "they stand for CUDA, and this is a CPU"
    return {"machine": machine("torch", device=here.device), "lists": lists, "missing": missing}


def outcomes(chosen: list[str], device: str, enter: Enter) -> Outcomes:
    """Each row of the ops, in few dtype patterns and both low dtypes, with gradients."""
    found: Outcomes = {}
    for low in run_ops.LOW:
        for op in chosen:
            for at, row in enumerate(run_ops.rows(op)):
                for name in run_ops.FEW:
                    pattern = ops.dtypes(ops.PATTERNS[name], low)
                    case = Case(op, at, name, str(low).removeprefix("torch."))
                    found[case] = outcome(row, pattern, device, partial(enter, low))
    return found


def outcome(row: ops.Row, pattern: list[torch.dtype], device: str, enter: Any) -> Outcome:
    (args, kwargs), leaves = ops.arguments(row, pattern, lambda t: t.to(device, copy=True))
    count = len(row.overload._schema.returns)
    wanted = range(count) if row.outputs is None else row.outputs
    return on_data(
        lambda: list(tree_leaves(row.overload(*args, **kwargs))),
        [leaf.requires_grad_() for leaf in leaves],
        enter,
        differentiable=lambda at: at in wanted,
        scratch=lambda at: at in row.scratch,
    )


def dtypes(outcome: Outcome) -> Outcome:
    """An outcome without its bits."""
    return replace(
        outcome,
        outputs=tuple(map(_bare, outcome.outputs)),
        gradients=tuple(map(_bare, outcome.gradients)),
    )


def _bare(value: Any) -> Any:
    return replace(value, bits=b"") if isinstance(value, Seen) else None


def against(
    torchs: Outcomes, again: Outcomes, ours: Outcomes
) -> tuple[dict[str, int], list[dict[str, str]]]:
    """How many calls are the same, and a row for each that is not.

    An op that has not repeated its bits in some call may not do so in any.
    """
    shaky = {case.op for case, wanted in torchs.items() if wanted != again[case]}
    line = {"calls": len(torchs), "same bits": 0, "torch does not repeat its bits": 0,
            "different": 0}  # fmt: skip
    unlike = []
    for case, wanted in torchs.items():
        if ours[case] == wanted:
            line["same bits"] += 1
        elif case.op in shaky and dtypes(wanted) == dtypes(ours[case]):
            line["torch does not repeat its bits"] += 1
        else:
            line["different"] += 1
            unlike.append(_row(case, wanted, ours[case], "torch", "polymp"))
    return line, unlike[:SHOWN]


def fake_against(chosen: list[str], real: Outcomes) -> dict[str, list[dict[str, Any]]]:
    """Whether fake tensors said the same as real ones: dtypes and shapes, op by op."""
    same, raises, unlike = 0, 0, []
    logging.disable(logging.CRITICAL)  # torch logs every fake call that fails at length
    for case, outcome in real.items():
        row = run_ops.rows(case.op)[case.row]
        pattern = ops.dtypes(ops.PATTERNS[case.way], getattr(torch, case.low))
        enter = partial(run_ops.torch_cuda, getattr(torch, case.low))
        fake = run_ops.run_cuda(row, pattern, "plain", enter)
        wanted = [f"{s.dtype} {s.shape}" for s in outcome.outputs if isinstance(s, Seen)]
        found = [str(s).partition(" on ")[0] for s in fake.outputs if " on " in str(s)]
        if outcome.error and not outcome.outputs:
            raises += not fake.error
            same += bool(fake.error)
        elif found == wanted:
            same += 1
        else:
            unlike.append(_row(case, fake, outcome, "fake", "real"))
    logging.disable(logging.NOTSET)
    line = {"ops": len(chosen), "calls": len(real), "the same": same,
            "raise with data alone": raises, "different": len(unlike)}  # fmt: skip
    return {
        "Fake tensors against real ones": [line],
        "Calls that differ between fake and real tensors": unlike[:SHOWN],
    }


def _row(case: Case, left: Outcome, right: Outcome, a: str, b: str) -> dict[str, str]:
    return {"op": case.op, "inputs": case.way, "region": case.low,
            a: "; ".join(_words(left)), b: "; ".join(_words(right))}  # fmt: skip


def _words(outcome: Outcome) -> Iterator[str]:
    if outcome.error:
        yield outcome.error[:120]
    for value in outcome.outputs:
        yield f"{value.dtype} {value.shape}" if isinstance(value, Seen) else str(value)
    if any(isinstance(value, Seen) for value in outcome.gradients):
        yield "gradients " + ", ".join(v.dtype for v in outcome.gradients if isinstance(v, Seen))
