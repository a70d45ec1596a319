"""torch's own kernels on its autocast keys, as policies.

For each device that has one, the shipped table `torch-<device>` describes torch's own
kernels: the rows of all supported versions, of which those count whose op the installed torch has.
An op runs on torch's kernel wherever a policy agrees with that table.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch

from polymp import versions
from polymp.backends.torch.autocast import op_facts
from polymp.backends.torch.compat import dispatcher, modes
from polymp.errors import PolicyError
from polymp.rules import policy_files
from polymp.rules.policy import Policy
from polymp.rules.row import LOW, Row, Rule
from polymp.rules.vocabulary import vocabulary

# So many tables are kept, those used last; kernels keep what they have read in them.
POLICIES = 32
DEVICES = ("cpu", "cuda", "mps", "xpu")


# Ops that torch registers in builds for one vendor's GPUs alone: whether this is such a build.
# Source: torch v2.13 aten/src/ATen/cudnn/AutocastRNN.cpp, miopen/AutocastRNN.cpp.
BUILDS = {
    "_cudnn_rnn": torch.version.cuda is not None,
    "miopen_rnn": torch.version.hip is not None,
}


# Ops that torch has and did not register yet in its first supported versions: the version that did.
# Source: torch v2.12 aten/src/ATen/autocast_mode.h.
SINCE = {"rms_norm": (2, 12)}


@cache
def policy(device: str) -> Policy:
    """Return this torch's own table of the device; an empty one for a device without."""
    name = f"torch-{device}"
    if device not in DEVICES:
        return Policy(name, ())
    shipped, here = policy_files.load(name), versions.parts(torch.__version__)
    return replace(shipped, rows=tuple(r for r in shipped.rows if SINCE.get(r.of, here) <= here))


@cache
def kernels(device: str) -> frozenset[str]:
    """Return the ops that have a kernel of torch's own on the device's autocast key."""
    # Read before polymp registers a kernel of its own on that device's key. Without the overloads
    # that take named dimensions, until torch 2.12: no policy has rules for them.
    key = dispatcher.autocast_key(device)
    found = frozenset() if key is None else dispatcher.registered(key)
    return frozenset(op for op in found if not dispatcher.takes_names(op))


def table(policy: Policy, dtype: str, device: str = "") -> Mapping[str, Row]:
    """Return the overloads of this torch that have a row in regions of a dtype, with the rows."""
    # An fp32 row of the device's own table stands in where the device has no low kernel of an op.
    return _table(policy, dtype, device, len(vocabulary().registered))


@lru_cache(maxsize=2 * POLICIES)
def _table(policy: Policy, dtype: str, device: str, registered: int) -> Mapping[str, Row]:
    words, asked = vocabulary(), replace(policy)  # what is kept in it for the search goes with it
    lacking = [f"class:{kind}" for kind in words.traits["wide"]]  # rows that lower are refused
    spelled = {overload: op.name for op in words.ops.values() for overload in op.aten}
    own = (row.of.removeprefix("aten:") for row in policy.rows if row.of.startswith("aten:"))
    found: dict[str, Row] = {}
    op_of = dict.fromkeys(own, "") | spelled
    for overload, op in op_of.items():
        won = asked.winner(op, dtype, f"aten:{overload}")
        named = won is not None and won.of in (op, f"aten:{overload}", *lacking)
        low = won is None or won.rule in (Rule.LOWER, Rule.WIDEST)
        # Rows that name no op mean those that can: "cpu" has the fewest low kernels.
        if low and not named and not op_facts.has_low(overload, "cpu", dtype):
            won = row(device, overload, dtype)
            won = won if won is not None and won.rule is Rule.FP32 else None
        wide = overload in op_facts.READS or (device == "cpu" and overload in op_facts.STEPS_ON_CPU)
        if won is None and wide and policy.halves != "raise":
            won = Row(op, Rule.FP32_KEEP)
        if won is None or won.rule is Rule.PARTS or overload in op_facts.UNTOUCHED:
            continue
        if dispatcher.overload(overload) is not None:  # this torch is too old or too new for it
            found[overload] = won
    for overload, functional in op_facts.ADD_IN_PLACE.items():
        won = found.get(functional)
        rules = Rule.FP32, Rule.FP32_KEEP, *([Rule.FIRST] if overload.endswith("out") else ())
        if won is not None and won.rule in rules:
            found.setdefault(overload, won)
    return found


def row(device: str, op: str, dtype: str) -> Row | None:
    """Return the row of an op in torch's table; None if torch has no kernel or the table no row."""
    # A registered op has no kernel of torch's; its row is the rule it was registered with. An op
    # that this build of torch leaves out is never called, and has the row of other builds.
    if op in kernels(device) or "::" in op or not BUILDS.get(op, True):
        return table(policy(device), dtype).get(op)
    return None


def as_mul(device: str, policy: Policy, op: str, dtype: str) -> Row | None:
    """Return the row of a multiplication, for a product that adds nothing up; None in torch's."""
    rows = table(policy, dtype, device)
    lowers = op in op_facts.PRODUCTS and op in rows and rows[op].rule in (Rule.LOWER, Rule.FP8)
    if not lowers or policy.halves == "raise":
        return None
    row = rows.get("mul.Tensor")
    return Row("mul", Rule.WIDEST) if row is None or row.rule is Rule.KEEP else row


def agrees(device: str, other: Policy, op: str, dtype: str) -> bool:
    """Return whether torch's own kernel, or the lack of one, does what `other` asks for."""
    ours, theirs = row(device, op, dtype), table(other, dtype, device).get(op)
    if ours is None and theirs is not None and theirs.rule is Rule.FP32_KEEP:
        if op in op_facts.READS or vocabulary().op(vocabulary().of_aten(op)).picks:
            return device != "cpu"  # see `autocast_kernel`
        return op_facts.in_float32(op) and (op, device) not in OUR_KERNELS
    if ours is None or theirs is None:
        return ours is theirs
    if "::" in op or ours.rule is not theirs.rule:
        return False
    if theirs.rule is Rule.WIDEST and other.halves != policy(device).halves:
        return False
    return theirs.instead in ("", ours.instead)


# `layer_norm` of a low input on CPUs: computed in float32, with the low input saved for
# backward.
#
# torch's backward kernel there adds up the gradients of the weights in the dtype of the input:
# with 65,536 rows in bfloat16 nothing of such a sum is right. A cast before would save a float32
# input; so it is done where no kernel can have a backward pass of its own: under transforms of
# torch.func. Source: torch v2.13 aten/src/ATen/native/cpu/layer_norm_kernel.cpp, whose buffers
# have X's dtype.


Optional = torch.Tensor | None


def _layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: Optional = None,
    bias: Optional = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    if modes.is_transformed():
        wide = x.float(), normalized_shape, _wide(weight), _wide(bias), eps
        return torch.layer_norm(*wide).to(x.dtype)
    result: torch.Tensor
    result = _LayerNorm.apply(x, normalized_shape, weight, bias, eps)  # type: ignore[no-untyped-call]
    return result


# By op and device, what runs in place of torch's kernel for low inputs.
OUR_KERNELS = {("layer_norm", "cpu"): _layer_norm}


def _wide(t: Optional) -> Optional:
    return None if t is None else t.float()


class _LayerNorm(torch.autograd.Function):
    """Forward and backward in float32; the result and the gradient have the input's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        shape: Sequence[int],
        weight: Optional,
        bias: Optional,
        eps: float,
    ) -> torch.Tensor:
        y, mean, rstd = torch.native_layer_norm(x.float(), shape, _wide(weight), _wide(bias), eps)
        ctx.shape = shape
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Optional, None, Optional, Optional, None]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[at] for at in (0, 2, 3)]
        found = torch.ops.aten.native_layer_norm_backward(
            grads[0].float(), x.float(), ctx.shape, mean, rstd, _wide(weight), _wide(bias), wanted
        )
        dx, dweight, dbias = (
            g.to(t.dtype) if want else None
            for g, t, want in zip(found, (x, weight, bias), wanted, strict=True)
        )
        return dx, None, dweight, dbias, None


# Checks of policies against torch: rows that it cannot follow are found before anything runs.


def check(policy: Policy, device: str, dtype: str = "") -> None:
    """Refuse a policy with a row that torch cannot follow."""
    lacks = lacking(policy, device, dtype) if dtype else {}
    for why in (*refusals(policy).values(), *lacks.values()):
        raise PolicyError(why)


def lacking(policy: Policy, device: str, dtype: str) -> dict[Row, str]:
    """Return the rows that ask for a low kernel which torch lacks on a device, with the reasons."""
    found: dict[Row, str] = {}
    for name, row in table(policy, dtype, device).items():
        if row.rule in (Rule.LOWER, Rule.WIDEST) and not op_facts.has_low(name, device, dtype):
            found.setdefault(
                row,
                f"policy {policy.name!r}: torch has no {dtype} kernel of {name!r} on {device}, "
                f"which the row {row.of} = {row.rule} asks for. Leave the row out, or write fp32.",
            )
    return found


@lru_cache(maxsize=POLICIES)
def refusals(policy: Policy) -> Mapping[Row, str]:
    """Return the rows that torch cannot follow on any device, each with the reason."""
    refused: dict[Row, str] = {}
    words, shipped = vocabulary(), policy_files.shipped_rows()
    for row in policy.rows:
        spelled = row.of.removeprefix("aten:")
        if spelled != row.of and dispatcher.overload(spelled) is None:
            why = f"has a rule for {spelled!r}, which is no op of torch{_hint(spelled)}."
            refused[row] = f"policy {policy.name!r} {why}"
        if spelled in op_facts.UNTOUCHED:
            refused[row] = (
                f"policy {policy.name!r} has a rule for {spelled!r}, which can have none: torch "
                "makes parameters of its result. Leave the row out."
            )
        op = words.ops.get(row.of)
        if op is not None and not op.aten and not op.rule and replace(row, dtype="") not in shipped:
            why = f"has a rule for {row.of!r}, which torch lacks. {op.note}"
            refused[row] = f"policy {policy.name!r} {why}"
    patterns = {row.scope for row in policy.rows}
    for scope in patterns:
        rows = {replace(row, scope=""): row for row in policy.rows if row.scope == scope}
        scoped = patterns != {""}
        alone = Policy(policy.name, tuple(rows), policy.halves) if scoped else policy
        for low in LOW:
            for name, row in table(alone, low).items():
                for why in _faults(row, name):
                    refused.setdefault(rows.get(row, row), f"policy {policy.name!r} {why}")
    return refused


def _faults(row: Row, name: str) -> Iterator[str]:
    op = dispatcher.overload(name)
    assert op is not None, "a table holds what torch has"
    fault = schema_fault(op, name, row.rule)
    if fault and (name not in op_facts.ADD_IN_PLACE or row.of == f"aten:{name}"):
        yield f"has a rule for {name!r}, {fault}"


def schema_fault(op: torch._ops.OpOverload, name: str, rule: str = "") -> str:
    """Return why no policy may have a row for an op: the end of a sentence, or nothing."""
    if op._schema.is_mutable and not (rule == Rule.FIRST and _writes_its_first(op)):
        return (
            "which writes into an argument: the dtype of its result is given. Give the rule to "
            "the op without '_' or out=."
        )
    if not any("Tensor" in str(a.type) for a in op._schema.arguments):
        return f"which takes no tensor{_hint(name)}."
    return ""


def _writes_its_first(op: torch._ops.OpOverload) -> bool:
    """Return whether an op writes into its first argument, a tensor, and into no other."""
    written = [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]
    return written[0] and not any(written[1:]) and str(op._schema.arguments[0].type) == "Tensor"


def _hint(name: str) -> str:
    """Return the names that may have been meant by an op's name, as the end of a sentence."""
    base = name.partition(".")[0]
    packet = getattr(torch.ops.aten, base, None)
    if packet is not None:
        names = [base if o == "default" else f"{base}.{o}" for o in packet.overloads()]
        return f"; its overloads are {', '.join(names)}"
    known = (o for op in vocabulary().ops.values() for o in op.aten if "::" not in o)
    close = difflib.get_close_matches(base.removeprefix("aten::"), sorted(known), n=3)
    return f"; did you mean {', '.join(close)}" if close else ""
