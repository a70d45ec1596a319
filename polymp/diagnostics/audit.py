"""The audit of a run: its measurements as a table, a page and a suggestion.

    Measured ... -> Audit -> table, page, first fault, fitting scale
                          -> suggest -> Suggestion -> apply(policy) -> a policy to try

Suggested are rows of a policy, another dtype, or a loss scale. Nothing here knows a framework.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from polymp import text_table
from polymp.diagnostics.audit_records import MANY, Fault, Measured, together
from polymp.diagnostics.blame import ASKS, CAST, DIVIDING, OF_ONE, lost_constants
from polymp.diagnostics.call_record import BACKWARD, FORWARD, NOTHING_RAN, RECOMPUTE
from polymp.diagnostics.magnitudes import NARROW, joined
from polymp.diagnostics.page import Shown
from polymp.diagnostics.remedy import remedy_of, writes
from polymp.diagnostics.tables import Cell, Column, Table, TableKind
from polymp.dtypes import FORMATS
from polymp.errors import PolicyError, escaped
from polymp.rules import policy_files, scopes
from polymp.rules.policy import Policy
from polymp.rules.row import LOW, Rule
from polymp.rules.vocabulary import vocabulary
from polymp.scaling import LARGEST

_FIRST, *_OTHERS = NARROW  # the first is the dtype that needs a loss scale


@dataclass(eq=False, repr=False)
class Audit(Shown):
    """The measurements of a run, filled when its block ends; `print` shows them as a table.

    Attributes:
        results: of ops, in the order in which they were first reached.
        gradients: of parameters, by name.
        fault: the op that the first value that is not finite came from; None if all were finite.
        steps: how many steps were measured.
        scale: the loss scale that the gradients were multiplied by, 1 if none was known.
        left_out: how many calls were not measured, by the reason: in JAX, those in a `while` loop
            or a `shard_map`, and reads and writes of what `jax.new_ref` made.
    """

    results: Sequence[Measured] = ()
    gradients: Sequence[Measured] = ()
    fault: Fault | None = None
    steps: int = 0
    scale: float = 1.0
    left_out: Mapping[str, int] = field(default_factory=dict)

    def suggest(self, base: policy_files.Source = "amp") -> "Suggestion":
        """Suggest a change with which the audited steps train: rows, a dtype or a loss scale.

            mine = audit.suggest("amp").apply("amp")

            a fault of the data or of the mathematics     nothing, and where to look
            an optimizer broke the step                   nothing, and its remedy
            many ops overflow, or numbers beyond 65504    bfloat16
              are given to an op that computes in float16
            an op overflows, or loses most of its values  that op in float32, in its module
            gradients overflow, or many of them vanish    a loss scale to try; bfloat16 if none fits

        Ops after the first Inf cannot be judged: if a step still breaks, audit it again.

        Args:
            base: the policy that the steps ran by. An op that ran by a float32 row of it gets no
                other.

        Returns:
            The suggestion, which is false if nothing has to change.

        Raises:
            PolicyError: no such policy.
            ValueError: nothing was measured.
        """
        if not self.steps:
            raise ValueError(f"nothing was measured: first {_RUN_A_STEP}.")
        return _suggested(self, policy_files.load(base))

    @property
    def backward(self) -> list[Measured]:
        """All gradients: those of parameters, and those that backward ops made."""
        return [*self.gradients, *(m for m in self.results if m.direction == "backward")]

    def fitting_scale(self) -> float | None:
        """Return the largest loss scale at which no gradient would overflow float16.

        There is a factor 2 to spare. It is for the gradients that ops made in float16; where these
        are all zero, for those made in bfloat16; where these are, too, for all gradients.

        Returns:
            A power of two, which was not tried; None if all gradients were zero, if an op made all
            of one zero, or if one was Inf or NaN: how large it and those computed from it would be
            is not known.
        """
        found = [m.magnitudes for m in self.backward]
        unknown = any(m.inf or m.nan or (m.gone and not m.largest and not m.wide) for m in found)
        return None if unknown else self.highest_scale()

    def highest_scale(self) -> float | None:
        """The scale at which the gradients that were finite would fit; others may need less."""
        for run in (_FIRST, "bfloat16", ""):  # what float32 holds need not fit, if others are there
            made = (m.magnitudes for m in self.backward if run in (m.run, ""))
            if largest := max((max(m.largest, m.wide) for m in made), default=0.0):
                return float(2.0 ** math.floor(math.log2(FORMATS[_FIRST].max / 2 / largest)))
        return None

    def lost_gradients(self, scale: float = 1.0) -> float:
        """Return the share of gradient values other than zero that float16 makes zero.

        Values that float16 made zero in the run, and about as many of those computed from them
        as are zero for that reason, count as other than zero; at a scale up to the run's, as made
        zero.

        Args:
            scale: the loss scale, a power of two.

        Returns:
            From 0 to 1; 1 if all gradients are zero, at a loss scale of at most 1.
        """
        rows = self.backward
        if not rows:
            return 0.0
        every = joined(m.magnitudes for m in rows)
        gone = max(every.gone, every.vanished)
        there = (every.counted - every.bins[0]) / max(every.counted, 1) + gone
        if there == 0:
            return 1.0 if scale <= 1 else 0.0
        here = gone if scale <= self.scale else 0.0
        return (every.shares(_FIRST, scale).underflow + here) / there

    def _lines(self) -> list[str]:
        """The title, then lines on the whole run."""
        lines = [f"audit of {text_table.plural(self.steps, 'step')}"]
        if not self.results:
            lines.append(f"outside of optimizers and JAX's while loops, {NOTHING_RAN}")
            if not self.steps:
                lines.append(f"nothing was measured: first {_RUN_A_STEP}")
        if self.fault is not None:
            lines += ["first value that is not finite:", str(self.fault)]
        if self.left_out:
            calls = (f"{text_table.plural(n, 'call')} {why}" for why, n in self.left_out.items())
            lines.append(f"not measured: {', '.join(calls)}")
        if self.backward:
            lines += _scales(self)
        return [*lines, *([_LEGEND] if self.results or self.gradients else [])]

    def _table(self) -> Table:
        return _MEASURED.table([*self.results, *self.gradients], _COLUMNS, _cells)

    def __repr__(self) -> str:
        rows = f"{len(self.results)} results, {len(self.gradients)} gradients"
        return f"Audit({text_table.plural(self.steps, 'step')}, {rows})"


# The table: a row for every op and parameter, below lines on the whole run.

_RUN_A_STEP = (
    "run a step in the block of polymp.torch.audit, or call the function that polymp.jax.audit "
    "returns"
)

_PARAMETERS = "parameters"

_SECTIONS = {
    FORWARD: "forward: results of ops",
    RECOMPUTE: "recompute: the forward again, for the backward",
    BACKWARD: "backward: gradients that ops made",
    _PARAMETERS: "backward: gradients of parameters",
}

_CHANGED = "percent of values that this dtype would make Inf, zero or subnormal"

_COLUMNS = (
    Column("op"),
    Column("direction", on_page=True),
    Column("dtype", on_page=True),
    *(Column(name, True) for name in ("largest |x|", "over", "under", "sub")),
    *(Column(f"in {text_table.short(name)}", True, _CHANGED, on_page=True) for name in _OTHERS),
    Column("here"),
)

_LEGEND = (
    f"over, under, sub: percent of values that {_FIRST} would make Inf, zero, subnormal; here: "
    f"those that {_FIRST} made so in this run"
)


def _scales(audit: Audit) -> Iterator[str]:
    """The loss scale of the run, and the one that fits."""
    used = "1, or none is known" if audit.scale == 1 else _exact(audit.scale)
    fitting = audit.highest_scale()
    if fitting is None:
        yield f"loss scale: {used}; no finite gradient other than zero to fit one to"
        return
    shares = {s: audit.lost_gradients(s) for s in (1.0, audit.scale, fitting)}
    lost = [
        f"{text_table.share(share) or 'none'} {'unscaled' if s == 1 else f'at {_exact(s)}'}"
        for s, share in shares.items()
    ]
    most = "at most " if audit.fitting_scale() is None else ""
    fits = f"the largest at which no {_FIRST} gradient overflows: {most}{_exact(fitting)}"
    yield f"loss scale: {used}; {fits}"
    yield f"gradients that become zero in {_FIRST}: {', '.join(lost)}"


def _exact(scale: float) -> str:
    """A loss scale in six digits, or as a power of two: "65536", "2.0**36"."""
    text, (fraction, exponent) = f"{scale:g}", math.frexp(scale)
    return text if fraction != 0.5 or float(text) == scale else f"2.0**{exponent - 1}"


def _cells(measured: Measured) -> list[Cell | str]:
    """The cells of a row; the numbers are what columns are sorted by."""
    m = measured.magnitudes
    op = measured.module.rpartition(".")[2] if _is_gradient(measured) else measured.op
    first, *others = (m.shares(dtype) for dtype in NARROW)
    return [
        f"{op} {measured.source}".rstrip(),
        measured.direction,
        text_table.short(measured.run),
        Cell(f"{m.largest:.2g}", m.largest),
        *(Cell(text_table.share(x).removesuffix(" %"), x) for x in (*first, *map(sum, others))),
        ", ".join(_here(measured)),
    ]


def _here(measured: Measured) -> Iterator[str]:
    """Words on the Inf, NaN and zeros that the values became in this run."""
    m = measured.magnitudes
    yield from (what for what, there in (("Inf", m.inf), ("NaN", m.nan)) if there)
    if m.burst:
        yield f"{text_table.share(m.burst)} Inf"
    if m.vanished:
        yield f"{text_table.share(m.vanished)} zero"
    if measured.numbers:
        run = text_table.short(measured.run)
        yield lost_constants(measured.numbers, measured.run).replace(measured.run, run)


def _is_gradient(measured: Measured) -> bool:
    """True of the gradient of a parameter."""
    return measured.op == "gradient" and not measured.spelling


def _section_of(measured: Measured) -> tuple[str, str]:
    if _is_gradient(measured):
        return _PARAMETERS, measured.module.rpartition(".")[0]
    return measured.direction, measured.module


def _alike_measured(measured: Measured) -> Hashable:
    """A layer that its dtype broke, by an Inf or by making most values zero, is like no other."""
    m = measured.magnitudes
    broken = m.inf, m.nan, m.burst > 0, m.vanished > MANY
    module = measured.module.rpartition(".")[2] if _is_gradient(measured) else ""
    same = measured._replace(module=module)[:8]
    return *same, measured.numbers, *broken


_MEASURED: TableKind[Measured] = TableKind(_section_of, _alike_measured, together, _SECTIONS)


# Suggestions. Ops after the first Inf cannot be judged, so audit again with the suggestion.

Place = Measured | Fault

# From this many places that overflow, bfloat16 is better.
PLACES = 3

# Without a loss scale, one is suggested if more than this share of an op's gradients vanishes.
PART = 0.25

# From this many modules whose paths differ by a number alone, one pattern stands for all.
ALIKE = 3

# The scale to try where all gradients are zero: `GradScaler`'s own first one.
FIRST_SCALE = 2.0**16
_TOP = FORMATS[_FIRST].max

# Classes of ops after which it does not matter how large a number was.
_BOUNDED = ("softmax", "normalisation", "loss")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change to try; true if there is one. `print` shows it as rows for a policy's file."""

    # Rows that hold everywhere, as `Policy.override` takes them.
    rules: Mapping[str, str] = field(default_factory=dict)
    # Rows by pattern of module paths, as `Policy.override` takes them.
    scopes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    dtype: str | None = None  # "bfloat16" where no row makes float16 work, else None
    init_scale: float | None = None  # the loss scale to start with, None if that in use will do
    reasons: tuple[str, ...] = ()  # sentences; there may be some where nothing has to change

    def __bool__(self) -> bool:
        return bool(self.rules or self.scopes or self.dtype or self.init_scale)

    def apply(self, policy: policy_files.Source) -> Policy:
        """Return a policy with the suggested rows.

        The suggested dtype and loss scale are for the caller: `autocast(dtype=)`,
        `GradScaler(init_scale=)`.

        Args:
            policy: as `polymp.policy` takes it.

        Returns:
            The policy.

        Raises:
            PolicyError: no such policy.
        """
        loaded, rows = policy_files.load(policy), self.rules or self.scopes
        return loaded.override(rules=self.rules, scopes=self.scopes) if rows else loaded

    def __str__(self) -> str:
        """Rows to be pasted into a policy's file; all else is comments there."""
        lines = [f"# {escaped(' '.join(reason.split()))}" for reason in self.reasons]
        if not self:
            what = "No row, dtype or loss scale" if self.reasons else "Nothing"
            lines.append(f"# {what} to change.")
        if self.dtype:
            lines.append(f"# Compute in {self.dtype}.")
        if self.init_scale:
            lines.append(f"# Start with a loss scale of {_exact(self.init_scale)}.")
        if self:
            lines.append("# Not tried: change this, and audit again.")
        tables = {"": self.rules, **self.scopes} if self.rules or self.scopes else {}
        for scope, rows in sorted(tables.items()):
            lines += ["", f"[scopes.{_quoted(scope)}]" if scope else "[rules]"]
            lines += [f"{_quoted(of)} = {_quoted(rule)}" for of, rule in sorted(rows.items())]
        return "\n".join(lines)


def _quoted(text: str) -> str:
    """A TOML string: as JSON has it, but that DEL is escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def _suggested(audit: Audit, policy: Policy) -> Suggestion:
    fault = audit.fault
    if fault is not None and (fault.remedy or fault.kind in ("input", "index", "operation")):
        tries = _LOCATE if fault.kind == "operation" and fault.region else ""
        why = f"{_at(fault)}: {fault.why}. {remedy_of(fault)}{tries}"
        causes = _lost_before(audit, fault) if fault.kind == "operation" else []
        rows = _raised(causes, policy)
        return replace(rows, reasons=(why, *rows.reasons))
    if why := _hopeless(audit):
        lowered = any(m.region == _FIRST for m in _bursts(audit))
        casts = fault is not None and fault.op == "to" and fault.direction != BACKWARD
        if fault is not None and not lowered and (casts or fault.region != _FIRST):
            return Suggestion(reasons=(f"{why} There {ASKS.format(fault.run)}.",))
        return Suggestion(dtype="bfloat16", reasons=(why,))
    if found := _bursts(audit) or _losses(audit):
        return _raised([*found, *_losses(audit)], policy, _readers(audit, found))
    if fault is not None and (fault.direction != BACKWARD or audit.scale <= 1):
        return _unscaled(fault, policy)
    scaled = _scale(audit, policy)
    return scaled or replace(scaled, reasons=(*scaled.reasons, *_beyond(audit)))


def _beyond(audit: Audit) -> Iterator[str]:
    """Say of a run in other dtypes which values float16 would make Inf, the first of them."""
    if _in_float16(audit):
        return
    # What a region runs in float32, one of float16 runs in float32, too.
    rows = [m for m in audit.results if m.run in LOW or not m.region]
    beyond = (m for m in (*rows, *audit.gradients) if m.magnitudes.largest > _TOP)
    if (first := next(beyond, None)) is not None:
        holds = f"{_at(first)}: it holds {first.magnitudes.largest:.3g}, and {_FIRST} ends at"
        yield f"{holds} {_TOP:g}; this run is in other dtypes."


def is_broken(audit: Audit) -> bool:
    """True if a step broke, or an op overflowed or lost most of its values, row or no row."""
    return audit.fault is not None or bool(_bursts(audit) or _losses(audit))


def _forward(audit: Audit) -> list[Measured]:
    return [m for m in audit.results if m.direction != BACKWARD]


def _bursts(audit: Audit) -> list[Place]:
    return [m for m in _forward(audit) if m.magnitudes.burst > 0]


def _losses(audit: Audit) -> list[Place]:
    """Ops that lost most of their values or a constant; if an underflow broke the run, that one."""
    fault = audit.fault
    if fault is not None and fault.kind in ("underflow", "number", "saturation"):
        return [fault, *_lost_before(audit, fault)]
    return [m for m in _forward(audit) if _has_lost(m)]


def _has_lost(m: Measured) -> bool:
    return bool(m.numbers) or m.magnitudes.vanished > MANY


def _readers(audit: Audit, found: Sequence[Place]) -> list[Measured]:
    """Low ops that would round the same values again, in the module of an op or beside it."""
    # After an overflow, those whose results are not finite, up to an op whose result is bounded for
    # every input. After a value that was lost, up to the op that broke, those that keep it from 0
    # or 1: of an op alone that a fault names.
    forward, readers = _forward(audit), list[Measured]()
    for one in found:
        overflows = isinstance(one, Measured) and one.magnitudes.burst > 0
        if not overflows and one is not audit.fault:
            continue
        inner = f"{one.module}." if one.module else ""
        if not any(m.module.startswith(inner) for m in forward):
            inner = one.module[: one.module.rfind(".") + 1]  # of a layer without parts
        for m in forward[_place(one, forward) + 1 :]:
            if overflows and vocabulary().op(m.op).kind in _BOUNDED:
                break
            spoiled = m.magnitudes.inf or m.magnitudes.nan
            lowered = m.row is not None and m.row.rule is Rule.LOWER
            takes = spoiled if overflows else m.op in DIVIDING | OF_ONE
            if lowered and takes and f"{m.module}.".startswith(inner) and m not in found:
                readers.append(m)
            if spoiled and not overflows:
                break
    return readers


def _place(one: Place, forward: Sequence[Measured]) -> int:
    """The place of an op, or their number if it is none of them."""
    wanted = one.op, one.module, one.source, one.direction
    places = [(m.op, m.module, m.source, m.direction) for m in forward]
    return places.index(wanted) if wanted in places else len(places)


def _lost_before(audit: Audit, fault: Fault) -> list[Place]:
    """Ops that lost most of their values before the op that broke, in the same module."""
    forward = _forward(audit)
    at = _place(fault, forward)
    before = forward[:at] if at < len(forward) else []
    return [m for m in before if m.module == fault.module and _has_lost(m)]


def _hopeless(audit: Audit) -> str:
    """The reason why no row helps; "" if one may."""
    fault = audit.fault
    scaled = fault is not None and fault.direction == BACKWARD and audit.scale > 1
    if fault is not None and fault.kind == "overflow" and not scaled:  # else the scale may do
        beyond = next((operand for operand in fault.inputs if operand.largest > _TOP), None)
        if beyond is not None or fault.why == CAST.format("float16"):
            inputs = "its inputs"
            if beyond is not None:
                holds = f"{beyond.name or 'an input'} holds {beyond.largest:.3g}"
                inputs = f"{holds}, and float16 ends at {_TOP:g}: the inputs"
            back = f" {_GIVE}" * (fault.direction == BACKWARD)
            holds = "are beyond float16's range, and bfloat16 holds them."
            vain = fault.row.rule is Rule.FP32 if fault.row else not _selector(fault)
            other = "" if vain else f" The rule fp32 for {fault.op} may do, too."
            return f"{_at(fault)}: {inputs} {holds}{other}{back}"
    low = [m for m in _forward(audit) if m.run == "float16"]
    burst = [m for m in low if m.magnitudes.burst > 0]
    if len({(m.op, _alike(m.module)) for m in burst}) < PLACES:
        return ""
    return (
        f"{len(burst)} of {len(low)} ops that run in float16 give Inf where float32 does not, "
        f"{_at(burst[0])} first: float16's range is too small for this model, and bfloat16's "
        "is not."
    )


def _raised(found: Sequence[Place], policy: Policy, readers: Sequence[Measured] = ()) -> Suggestion:
    """Rows by which ops and the readers of their results run in float32, each in its module."""
    rules: dict[str, str] = {}
    inside: dict[str, dict[str, str]] = {}
    reasons: list[str] = []
    rows = {one: (_selector(one), scope_of(one.module)) for one in (*found, *readers)}
    alike = Counter((of, _alike(scope)) for of, scope in {*rows.values()})
    for one, (of, scope) in rows.items():
        if alike[of, _alike(scope)] >= ALIKE:
            scope = _alike(scope)
        why = f"{_at(one)}: {_READS if one in readers else _loss(one)}".removesuffix(".") + "."
        own = inside.setdefault(scope, {}) if scope else rules
        if not one.region:
            reasons.append(f"{why} There {ASKS.format(one.run)}.")
        elif not of:
            reasons.append(f"{why} No row can be for it: change the program.{_LOCATE}")
        elif one.row is not None and one.row.rule is Rule.FP32 and one.row in policy.rows:
            reasons.append(f"{why} The row {one.row} says float32 already: change the program.")
        elif of not in own:
            own[of] = Rule.FP32.value
            reasons.append(why)
    scoped = {scope: own for scope, own in inside.items() if own}
    return Suggestion(rules, scoped, reasons=tuple(reasons))


_LOCATE = " locate tries which ops before it help in float32."

_READS = "it reads the values that were lost, and would round them again."


def _selector(one: Place) -> str:
    """The selector for a row: the op that a row decided for, or its own; "" if none can be."""
    words, row = vocabulary(), one.row
    if writes(one.spelling):
        return ""
    if row is not None and row.of in words.ops:
        return row.of
    if one.op in words.ops:
        return one.op
    prefix, colon, name = one.spelling.partition(":")
    known = prefix in ("aten", "jax") and colon and name.partition(".")[0] not in _CASTS
    return one.spelling if known else ""


# Casts that the program itself makes; a policy leaves them.
_CASTS = ("_to_copy", "to", "convert_element_type", "copy", "clone")


def scope_of(module: str) -> str:
    """Return a pattern that is a module's path; "" where none can be."""
    pattern = re.sub(r"([*?[])", r"[\1]", module)
    try:
        scopes.check(pattern, "suggest()")
    except PolicyError:
        return ""
    return pattern


def _alike(scope: str) -> str:
    """A path with a star for each name that is a number."""
    return ".".join("*" if name.isdigit() else name for name in scope.split("."))


def _unscaled(place: Place, policy: Policy) -> Suggestion:
    """A row for an op that broke where no loss scale is known."""
    rows = _raised([place], policy)
    return replace(rows, reasons=(*rows.reasons, *[_GIVE] * (place.direction == BACKWARD)))


_GIVE = "If the loss is scaled, give audit the scaler."


def _scale(audit: Audit, policy: Policy) -> Suggestion:
    """A loss scale, where gradients need another one."""
    fits, scale, fault = audit.highest_scale(), audit.scale, audit.fault
    burst = [m for m in audit.results if m.direction == BACKWARD and m.magnitudes.burst > 0]
    over: Place | None = burst[0] if burst else fault
    if over is not None:
        if scale <= 1:
            return _unscaled(over, policy)
        cast = max((o.largest for o in fault.inputs), default=0.0) if fault is not None else 0.0
        if cast > _TOP:
            fits = min(fits or scale, 2.0 ** math.floor(math.log2(scale * _TOP / 2 / cast)))
        lower = min(fits or scale, scale / 2)
        why = f"{_at(over)}: gradients overflow float16; the last loss scale was {_exact(scale)}"
        return Suggestion(init_scale=lower, reasons=(f"{why}; try {_exact(lower)}.",))
    lost = audit.lost_gradients(scale)
    if lost > MANY:
        part = text_table.share(lost)
        why = f"gradients: {part} of the values that are not zero are zero in float16"
    else:
        worst = max(audit.backward, key=_vanished, default=None)
        if worst is None or scale > 1 or _vanished(worst) <= PART or fits is None or fits <= scale:
            return Suggestion()
        why = f"{_at(worst)}: {_vanished(worst):.0%} of its values are zero in float16"
    if not _in_float16(audit):
        if fits is None:  # all are zero in this run, too
            return Suggestion()
        needs = f"{why}, which needs a loss scale of {_exact(fits)}; this run is in other dtypes."
        return Suggestion(reasons=(needs,))
    if fits is None:
        why = f"gradients: all are zero, at a loss scale of {_exact(scale)}; try {FIRST_SCALE:g}."
        return Suggestion(init_scale=FIRST_SCALE, reasons=(why,))
    fits = min(fits, LARGEST)
    if fits <= scale or audit.lost_gradients(fits) > MANY:
        why = f"{why} at every loss scale at which none overflows: bfloat16 has the range."
        return Suggestion(dtype="bfloat16", reasons=(why,))
    why = f"{why} at a loss scale of {_exact(scale)}; try {_exact(fits)}."
    return Suggestion(init_scale=fits, reasons=(why,))


def _in_float16(audit: Audit) -> bool:
    return any((m.region or m.run) == _FIRST for m in audit.results)


def _vanished(m: Measured) -> float:
    """The share of a gradient's values that float16 made zero, here or before."""
    return max(m.magnitudes.gone, m.magnitudes.vanished)


def _at(one: Place) -> str:
    place = " ".join(filter(None, (one.module and f"in {one.module}", one.source)))
    back = ", backward" if one.direction == BACKWARD else ""
    return f"{one.op} {place}".rstrip() + back


def _loss(one: Place) -> str:
    if isinstance(one, Fault):
        return one.why
    m = one.magnitudes
    if m.burst > 0:
        return f"{m.burst:.0%} of its values are Inf in float16 and are not in float32."
    if one.numbers:
        return f"the number {lost_constants(one.numbers, one.run)} and is not in float32."
    return f"{m.vanished:.0%} of its values are zero in float16 and are not in float32."
