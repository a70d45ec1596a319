"""The change that helps where a step broke, and whether the step was tried with it.

    a fault -> the step again, with ops in float32 -> the fault, with what helped
    a fault of a run that cannot be repeated       -> what may help

`locate` of both frameworks tries. Nothing here runs a framework.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Protocol, TypeGuard

from polymp.diagnostics.audit_records import Fault
from polymp.diagnostics.blame import ASKS, CONSTANT, UNTRIED_WIDE, UPDATE
from polymp.diagnostics.call_record import BACKWARD
from polymp.rules.policy import Policy
from polymp.rules.row import LOW
from polymp.rules.vocabulary import vocabulary

# Behind a remedy.
UNTRIED = " That was not tried."
TRIED = ", with which this step was tried and is finite"

# The name of an input that a kernel of the user's or numpy has made Inf or NaN.
OUTSIDE = "what code outside of torch's ops wrote into"

# A change of the policies of a step's regions.
Change = Callable[[Policy], Policy]

# So many ops that break one after another are named; beyond that, all in float32 are tried.
_MOST = 3

# By so many powers of two a loss scale may be too large.
_SCALES = 24


class Repeat(Protocol):
    """Repeats a step as it is, with a change, or with its loss scales multiplied by a number."""

    def __call__(self, change: Change | None = None, scale: float = 1.0) -> Fault | None:
        """Return its fault."""


def tried(fault: Fault, ops: Sequence[str], repeat: Repeat, scaled: bool) -> Fault:
    """Repeat a step with ops in float32; return its fault with what helped."""
    # Or another fault, if the step breaks there with all ops in float32: no dtype is to blame then.
    # `ops` are the names of those in its regions, in order, and `scaled` says whether it has a loss
    # scaler.
    known = fault._replace(remedy=remedy_of(fault))
    if fault.direction == UPDATE or fault.kind in ("input", "index", "inside") or not ops:
        return known
    found = repeat()
    if found is None or found[:6] != fault[:6]:  # another op, place, or kind
        return fault._replace(remedy=_NOT_AGAIN)
    known = known._replace(why=fault.why.removesuffix(f"; {UNTRIED_WIDE}"))
    scale = 2.0**-_SCALES if scaled else 1.0
    if scaled and fault.direction == BACKWARD and not _breaks(fine := repeat(scale=scale)):
        return known._replace(remedy=_scale(repeat, fine))
    named: dict[str, str] = {}  # ops in float32, as policies call them, each with its modules
    while _breaks(found) and found.region and len(named) < _MOST:
        op = found.op if vocabulary().op_of(found.op) else found.spelling
        if named.get(op) in ("", found.module):
            break  # it was in float32
        named[op] = "" if op in named else found.module
        found = repeat(_with_float32(named), scale)
    wider = fault.run == "float16" and fault.kind in ("overflow", "underflow")
    other = f" Or use bfloat16.{UNTRIED}" if wider else ""
    if not _breaks(found):
        first = "Use another constant, or give" if fault.kind == "number" else "Give"
        if scaled:
            found = repeat(_with_float32(named))
        return known._replace(remedy=f"{first} {_listed(named)}{_so(found)}{other}")
    found = repeat(_all_in_float32, scale)
    if not _breaks(found):
        return known._replace(remedy=f"{_others(ops, repeat, scale)}{other}")
    if found.run in LOW:  # in no policy's hands
        op = "the cast" if found.op == "to" else found.op
        where = f"{f'{op} {found.source}'.rstrip()}, where {ASKS.format(found.run)}"
        how = f"With all ops in float32 this step was tried, and breaks at {where}"
        bfloat16 = ", or use bfloat16" if found.run == "float16" else ""
        return known._replace(remedy=f"{how}{bfloat16}.{UNTRIED}")
    code = "Change the code: this step was tried with all ops in float32, and is not finite either."
    if found[:6] == fault[:6]:
        return known._replace(remedy=code)
    return found._replace(row=None, remedy=code.replace("float32,", "float32, as shown here,"))


_NOT_AGAIN = (
    "Called again, the step did not break in this way, so that nothing was tried. Give it its "
    "batch and its random numbers as arguments."
)


def _breaks(found: Fault | None) -> TypeGuard[Fault]:
    """True if a repeated step has a fault of its own, and not what an earlier one left."""
    return found is not None and found.kind != "input"


def _so(found: Fault | None) -> str:
    """The end of a sentence on a change after which a step does not break."""
    if found is None:
        return f"{TRIED}."
    if found.kind == "input":
        rest = f"but for what it is given: {found.why}"
    else:
        rest = "once its loss scale is smaller, which the scaler sees to"
    return f". With that, this step was tried, and is finite {rest}."


def _scale(repeat: Repeat, fine: Fault | None) -> str:
    """The remedy of a gradient that is finite with a smaller loss scale, and all else `fine`."""
    low, high = 0, _SCALES  # powers of two: by the first it breaks, by the second it does not
    while high - low > 1:
        middle = (low + high) // 2
        if _breaks(found := repeat(scale=2.0**-middle)):
            low = middle
        else:
            high, fine = middle, found
    return (
        f"Divide the loss scale by {2**high}{_so(fine)} A scaler lowers it by itself, as it skips "
        "steps; or give it a smaller init_scale."
    )


def _listed(ops: Mapping[str, str]) -> str:
    """Ops in the modules that they are given for, and the rule for them, in words."""
    if len({*ops.values()}) > 1:
        some = (f"{op} (in module {module!r})" if module else op for op, module in ops.items())
        return f"{' and '.join(some)} the rule fp32"
    module = next(iter(ops.values()))
    return f"{' and '.join(ops)} the rule fp32{f' in module {module!r}' if module else ''}"


def _with_float32(ops: Mapping[str, str]) -> Change:
    """The change that gives ops the rule fp32, in their modules; "" stands for all."""
    rules = {op: "fp32" for op, module in ops.items() if not module}
    scopes: dict[str, dict[str, str]] = {}
    for op, module in ops.items():
        if module:
            scopes.setdefault(module, {})[op] = "fp32"
    return cache(lambda policy: policy.override(rules=rules, scopes=scopes))


@cache
def _all_in_float32(policy: Policy) -> Policy:
    plain = replace(policy, rows=tuple(row for row in policy.rows if not row.scope))
    return plain.override(rules={"all": "fp32"})


def _others(ops: Sequence[str], repeat: Repeat, scale: float) -> str:
    """The remedy where ops other than those that broke need float32, in which all are finite."""
    names = [name for name in dict.fromkeys(ops) if vocabulary().op_of(name)]
    low, high = 0, len(names)  # with the first `low` in float32 the step is not finite
    while high - low > 1:
        middle = (low + high) // 2
        found = repeat(_with_float32(dict.fromkeys(names[:middle], "")), scale)
        low, high = (middle, high) if _breaks(found) else (low, middle)
    for some in (names[low:high], names[:high]):
        if 0 < len(some) <= _MOST:
            named = dict.fromkeys(some, "")
            found = repeat(_with_float32(named), scale)
            if not _breaks(found):
                found = found if scale == 1.0 else repeat(_with_float32(named))
                return f"Give {_listed(named)}{_so(found)}"
    found = None if scale == 1.0 else repeat(_all_in_float32)
    return f"Give all ops the rule fp32{_so(found)} Which of them need it was not found."


def remedy_of(fault: Fault) -> str:
    """Return the change that may help where an op made a value that is not finite."""
    if fault.remedy:
        return fault.remedy
    if fault.kind == "input" and re.search(r"\.grad (is|of)", fault.why):  # of a tensor of torch
        return "Call zero_grad() before the backward pass, which adds to what is there."
    if fault.kind == "input" and fault.why.startswith(OUTSIDE):
        return "Look at that code."
    if fault.kind == "input":
        return "Look at the data or the parameters."
    if fault.kind == "index":
        return "Look at the data."
    place = f" in module {fault.module!r}" if fault.module else ""
    ruled = fault.region and vocabulary().op_of(fault.op) and not writes(fault.spelling)
    wide = f"give {fault.op} the rule fp32{place}" if ruled else f"run {fault.op} in float32{place}"
    if fault.op == "to":
        wide = "leave this cast out"
    if fault.kind == "number":
        return f"Use another constant, or {wide}.{UNTRIED}"
    if fault.why == CONSTANT:
        low = f", or {wide}" if fault.run in LOW else ""
        return f"Use a constant that is finite in {fault.run}{low}.{UNTRIED}"
    tried = fault.run != "bfloat16" and not fault.why.endswith(UNTRIED_WIDE)
    if fault.kind == "operation" and not tried:
        return f"Look at its inputs, or {wide}.{UNTRIED}"
    if fault.kind == "operation" or fault.run == "float32":
        made = f" If ops in {fault.region} made them wrong, give those the rule fp32.{UNTRIED}"
        return (
            f"Change the code: of these inputs {fault.op} has no finite result in float32 either."
            f"{made if fault.region else ''}"
        )
    other = ", or use bfloat16" if fault.run == "float16" and fault.kind != "saturation" else ""
    return f"{wide[0].upper()}{wide[1:]}{other}.{UNTRIED}"


def writes(spelling: str) -> bool:
    """Return whether an op is in place or has `out=`: no row changes the dtype of its result."""
    name, _, overload = spelling.partition(".")
    return name.endswith("_") or overload.endswith("out")


# An optimizer that breaks a step.

# Where numbers grow without bound.
SLOWER = f"Lower the learning rate, or clip the gradients.{UNTRIED}"

NO_EPS = "the number that keeps its divisor from zero is zero"


def larger_eps(dtype: str) -> float:
    """Return an eps that is not zero in a dtype, with digits to spare."""
    return 1e-4 if dtype == "float16" else 1e-8


def of_optimizer(framework: str, kind: str, dtype: str, lost: str = "", tried: bool = False) -> str:
    """Return the change that helps where an optimizer made a value that is not finite."""
    # `lost` is a clause on an eps, "Adam's eps is 0", and `tried` says whether the step was finite
    # with a larger one.
    wide = f"keep the weights in float32 and lower the ops, as polymp.{framework}.autocast does."
    if kind == "number":
        how = TRIED if tried else ""
        or_wide = f", or {wide}" if dtype in LOW else "."
        give = f"Give it eps={larger_eps(dtype):g}{how}{or_wide}{'' if tried else UNTRIED}"
        return f"{lost}, so that it divides by zero. {give}"
    return f"{wide[0].upper()}{wide[1:]}{UNTRIED}" if kind.endswith("flow") else SLOWER
