"""The kernels of ours of an op, which run it by the row that the policy in force has for it.

One is on torch's autocast key of a device, one in front of torch.func's transforms. If the policy
of the region agrees with torch for the op, a kernel passes the call on to torch's own kernel, which
it replaced. torch.compile traces through it.

    row           of a policy: an op and its rule
    decision      for one call: the dtypes that follow from the rule
    OpOnDevice    an op, and how its calls run
    OpInRegion    its row in one region, and what follows from it for every call
    log entry     a call and its decision, for `explain` and its like
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import torch
from torch.library import get_kernel

from polymp.backends.torch.autocast import (
    dtype_names,
    fp8_product,
    op_facts,
    region_casts,
    regions,
    torch_table,
)
from polymp.backends.torch.compat import dispatcher, dynamo, modes, tree_leaves, tree_map_only
from polymp.errors import ForbiddenOpError
from polymp.fp8 import RECIPES
from polymp.rules import decision_log
from polymp.rules.policy import Decision, Policy, Region
from polymp.rules.row import LOW, Row, Rule
from polymp.rules.vocabulary import vocabulary

# Rules by which a policy has ops cast in front of transforms, also where torch does the same: torch
# takes some that run low apart, and cannot batch float32 statistics beside a low input.
AS_A_WHOLE = Rule.LOWER, Rule.FP32_KEEP


Function = Callable[..., Any]


def make(name: str, device: str, key: str) -> Function | None:
    """Make the kernel of an op on an autocast key; None if the op cannot have one of ours."""
    op = dispatcher.overload(name)
    if op is None or name in op_facts.UNTOUCHED:  # the first may change: a library is loaded
        return None
    return _made(op, name, device, key)


@cache
def _made(op: torch._ops.OpOverload, name: str, device: str, key: str) -> Function:
    replaced: Any = _torch_kernel(name, key) if name in torch_table.kernels(device) else None
    excluded = dispatcher.keyset(key)
    pass_on, call = dispatcher.passing_on(op, key), dispatcher.calling(op)
    on_device = op_on(name, device)
    writes = op._schema.is_mutable
    if writes:
        region_casts.watch(device)  # first, for this kernel replaces one of those that it puts

    def kernel(keys: torch._C.DispatchKeySet, *args: object, **kwargs: object) -> Any:
        if writes:
            region_casts.writing(kwargs.get("out", args[0]))
        in_region = on_device.in_region(regions.in_force(device), args)
        if (recorder := decision_log.current()) is not None:
            entry = on_device.log_entry(in_region, args)
            return recorder.around(entry, run, in_region, keys, args, kwargs)
        return run(in_region, keys, args, kwargs)

    def run(in_region: OpInRegion, keys: torch._C.DispatchKeySet, args: Any, kwargs: Any) -> Any:
        row, agrees = in_region.row, in_region.agrees
        if agrees and replaced is not None:
            return replaced.call_boxed(keys, *args, **kwargs)
        # The op runs as if it had no kernel here; ops inside it have their rules. While a record is
        # made, every op has one, also where torch, which has none, does as the row says; the record
        # has such an op as a whole.
        if row is None:
            return pass_on(keys, args, kwargs)
        if agrees and replaced is None:
            with decision_log.paused():
                return pass_on(keys, args, kwargs)
        with dispatcher.ExcludeKeys(excluded):
            if row.rule is Rule.KEEP:
                return call(*args, **kwargs)
            return on_device.run(in_region, region_casts.cast, call, args, kwargs)

    return dynamo.no_frame(kernel, inside=True)


@cache
def _torch_kernel(name: str, key: str) -> Any:  # torch's own class of kernels is private
    """Return torch's own kernel on the key; read once, before one of ours replaces it."""
    op = dispatcher.overload(name)
    assert op is not None, "torch registers what it has"
    return get_kernel(op, key)


def make_in_front(name: str) -> Function | None:
    """Make the kernel of an op in front of torch.func's transforms; None if torch lacks the op."""
    # vmap and grad take ops such as linear apart before autocast sees them, or after it, when it is
    # no longer known that the parts are of an op that has been cast. Under a policy, which may have
    # rules for the parts, the op is therefore cast as a whole first, here. Without one, the
    # transform does what it does under torch.autocast, bit for bit.
    op = dispatcher.overload(name)
    if op is None:
        return None
    front, places = get_kernel(op, dispatcher.FUNC_FRONT), dispatcher.tensors_of(op)

    def kernel(keys: torch._C.DispatchKeySet, *args: object, **kwargs: object) -> Any:
        def call(*args: object, **kwargs: object) -> Any:
            return front.call_boxed(keys, *args, **kwargs)

        tensors = (t for t in tree_leaves(args) if isinstance(t, torch.Tensor))
        device = next((t.device.type for t in tensors), None)
        args = tuple(_wrapped(places, args))
        if device not in torch_table.DEVICES or not torch.is_autocast_enabled(device):
            return call(*args, **kwargs)
        on_device, region = op_on(name, device), regions.in_force(device)
        in_region = on_device.in_region(region, args)
        row, key = in_region.row, dispatcher.autocast_key(device)
        if row is None or region.policy is None or key is None:
            return call(*args, **kwargs)
        if row.rule is Rule.FORBID or (in_region.agrees and row.rule not in AS_A_WHOLE):
            return call(*args, **kwargs)  # torch's kernel, or ours behind it, raises or casts
        with dispatcher.ExcludeKeys(dispatcher.keyset(key)):
            args = tree_map_only(torch.Tensor, modes.matched_tangent, args)
            how = in_region, torch.Tensor.to, call, args, kwargs
            if (recorder := decision_log.current()) is not None:
                entry = on_device.log_entry(in_region, args)
                return recorder.around(entry, on_device.run, *how)
            return on_device.run(*how)

    return dynamo.no_frame(kernel, inside=True)


def _wrapped(places: Sequence[int], args: Sequence[Any]) -> Sequence[Any]:
    """Replace numbers in the places of tensors by tensors, as torch wraps them."""
    if all(at >= len(args) or isinstance(args[at], torch.Tensor) for at in places):
        return args
    made, tensors = list(args), [args[at] for at in places if isinstance(args[at], torch.Tensor)]
    for at in places:
        if at < len(args) and isinstance(args[at], (bool, int, float, complex)):
            wide = {float: torch.float64, complex: torch.complex128}.get(type(args[at]))
            if tensors and all(t.dim() == 0 for t in tensors):  # then dtypes count alike
                wide = torch.result_type(tensors[0], args[at])
            made[at] = torch.tensor(args[at], dtype=wide)
    return made


# One op, run by its row: the decision of the policy, and the casts that follow from it.


CastFunction = Callable[[torch.Tensor, torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True)
class OpInRegion:
    """The row of an op in one region, and what follows from it for every call, worked out once."""

    region: Region
    policy: Policy  # of the region, or torch's table of the device
    row: Row | None  # the row that won; None if the policy has no row for the op
    agrees: bool  # whether torch's own kernel does the same
    decision: Decision | None  # if it does not depend on the dtypes of the inputs
    may_add: bool  # whether it may add up in the dtype of a low result, where it writes or reads
    as_mul: Row | None = None  # the row of a multiplication, which decides in place of `row`
    unsummed: "OpInRegion | None" = None  # for calls in which a product adds nothing up


@cache
def op_on(name: str, device: str) -> "OpOnDevice":
    """Return an op that torch has, on a device."""
    return OpOnDevice(name, device)


class OpOnDevice:
    """An op on a device: its row in each region, and how its calls run by it."""

    def __init__(self, name: str, device: str) -> None:
        op: Any = dispatcher.overload(name)
        self.name, self.device = name, device
        schema = op._schema.arguments
        # The arguments whose dtypes count for a rule, as in torch's `prioritize`.
        self._asked = tuple(str(a.type) in ("Tensor", "List[Tensor]") for a in schema)
        self._picks = vocabulary().op(vocabulary().of_aten(name)).picks
        self._into = name in op_facts.ADD_IN_PLACE
        self._in_float32 = op_facts.in_float32(name)
        self._steps = device == "cpu" and name in op_facts.STEPS_ON_CPU
        # Batch norm writes its running statistics, though its schema does not say so: what is
        # written to a cast is copied back. Its kernels take a low input beside float32 statistics.
        self._written = [at for at, a in enumerate(schema) if a.name.startswith("running_")]
        self._with_low_input: Sequence[int] = range(1, len(schema)) if self._written else ()
        # By identity: regions that are in force are kept for the life of the process.
        self._in_regions: dict[int, OpInRegion] = {}

    def in_region(self, region: Region, args: Sequence[Any] | None = None) -> OpInRegion:
        """Return the op's row in a region, for a call with these arguments."""
        known = self._in_regions.get(id(region))
        if known is None or known.region is not region:
            known = self._in_regions[id(region)] = self._looked_up(region)
        unsummed = known.unsummed
        if unsummed is not None and args is not None and not op_facts.adds_up(self.name, args):
            return unsummed
        return known

    def _looked_up(self, region: Region) -> OpInRegion:
        name, device, dtype = self.name, self.device, region.dtype
        unsummed = None
        if region.policy is None:
            policy, row = torch_table.policy(device), torch_table.row(device, name, dtype)
            agrees = "::" not in name
        else:
            policy, row = region.policy, torch_table.table(region.policy, dtype, device).get(name)
            agrees = torch_table.agrees(device, policy, name, dtype)
            if as_mul := torch_table.as_mul(device, policy, name, dtype):
                unsummed = OpInRegion(region, policy, row, False, None, False, as_mul)
        decision, fixed = None, (Rule.LOWER, Rule.FP8, Rule.FP32, Rule.KEEP)
        if row is not None and row.rule in fixed and not self._steps:
            decision = policy.apply(row, (), dtype)
        may_add = self._steps or name in op_facts.WRITES
        return OpInRegion(region, policy, row, agrees, decision, may_add, None, unsummed)

    def dtypes(self, args: Sequence[Any]) -> list[str]:
        """Return the dtypes of the inputs that count for a rule, in order."""
        return [
            dtype_names.NAMES[t.dtype]
            for arg, ask in zip(args, self._asked, strict=False)
            if ask
            for t in (arg if isinstance(arg, (list, tuple)) else (arg,))
            if isinstance(t, torch.Tensor)
            and t.device.type == self.device
            and t.is_floating_point()
        ]

    def decide(self, in_region: OpInRegion, args: Sequence[Any]) -> Decision:
        """Return the decision for a call."""
        low, policy, row = in_region.region.dtype, in_region.policy, in_region.row
        if in_region.as_mul is not None:
            as_mul = policy.apply(in_region.as_mul, self.dtypes(args), low)
            return as_mul._replace(rule=Rule.LOWER)
        assert row is not None, "an op without a row is not run by one"
        adds = in_region.may_add and op_facts.accumulates(self.name, args)
        if in_region.may_add and not adds and self.name in op_facts.ADD_IN_PLACE:
            if row.rule is not Rule.FIRST:
                return Decision(row.rule)
        if in_region.decision is not None:
            return in_region.decision
        decision = policy.apply(row, self.dtypes(args), low)
        if adds and decision.run in LOW and policy.halves != "raise":
            return Decision(decision.rule, "float32", decision.run)  # rounded once
        return decision

    def log_entry(self, in_region: OpInRegion, args: Sequence[Any]) -> decision_log.Entry:
        """Return the log entry of a call."""
        name, region, row, recipe = self.name, in_region.region, in_region.row, ""
        decision = Decision(Rule.PARTS) if row is None else self.decide(in_region, args)
        fallback = "it adds nothing up: a multiplication" if in_region.as_mul else ""
        if decision.rule is Rule.FP8:
            fp8 = RECIPES[in_region.policy.fp8]
            fallback = fp8_product.why_not(name, region, fp8, args)
            recipe = "" if fallback else fp8.name
        return decision_log.Entry(
            "torch", vocabulary().of_aten(name), f"aten:{name}", region.dtype, region.scope, row,
            tuple(self.dtypes(args)), decision, in_region.policy.name, recipe, fallback,
        )  # fmt: skip

    def run(
        self, in_region: OpInRegion, cast: CastFunction, call: Function, args: Any, kwargs: Any
    ) -> Any:
        """Run a call by the op's row in a region, with autocast excluded."""
        name, device, decision = self.name, self.device, in_region.decision
        if decision is None or in_region.may_add:
            decision = self.decide(in_region, args)
            if decision.rule is Rule.FORBID:
                assert in_region.row is not None, "it decided"
                forbid(in_region.policy, in_region.row, name, self.dtypes(args))
            batched = self._written and modes.is_transformed()  # which has no kernel for low inputs
            if self._in_float32 and decision.out in LOW and not batched:
                if (ours := torch_table.OUR_KERNELS.get((name, device))) is not None:
                    return ours(*args, **kwargs)
                decision = Decision(decision.rule, decision.out)
        if decision.run == "float32" and kwargs.get("dtype") is not None:
            decision = Decision(decision.rule)  # the caller's own dtype wins, as in torch
        if decision.rule is Rule.FP8:
            recipe = RECIPES[in_region.policy.fp8]
            if not fp8_product.why_not(name, in_region.region, recipe, args):
                return fp8_product.run(name, recipe, args, kwargs)
        if self._picks and decision.run is not None and decision.rule is not Rule.FP32:
            dtype = dtype_names.DTYPES[decision.out or decision.run]
            if device == "cpu" and op_facts.reads_wide(name, args):
                # Kernels of backward there add up in the dtype of the input.
                args = [_cast_argument(args[0], device, torch.float32), *args[1:]]
            return _cast_argument(call(*args, **kwargs), device, dtype)
        if decision.rule is Rule.FP32_KEEP and name in op_facts.READS:
            if not op_facts.reads_wide(name, args):
                return call(*args, **kwargs)
        if decision.run is None:
            result = call(*args, **kwargs)
            return result if decision.out is None else _back(result, decision.out)
        dtype = dtype_names.DTYPES[decision.run]
        if decision.run != in_region.region.dtype:
            cast = torch.Tensor.to
        written_to = kwargs.get("out", args[0]) if self._into else None
        if written_to is not None and written_to.dtype is not args[0].dtype:
            return call(*args, **kwargs)  # torch refuses it
        if name == "_cudnn_rnn" and any(
            w.dtype is not dtype and eligible(w, device) for w in args[1]
        ):
            args = (*args[:3], None, *args[4:])  # the buffer of the weights as they were
        # Last first, as torch's own kernels come to do it: autograd adds gradients up in the order
        # in which the casts were made.
        if kwargs:
            pairs = reversed(kwargs.items())
            kwargs = {key: _cast_argument(value, device, dtype, cast) for key, value in pairs}
        uncast = () if dtype is torch.float32 else self._with_low_input
        made = None
        for at in range(len(args) - 1, -1, -1):
            value = args[at]
            if isinstance(value, torch.Tensor):
                if value.dtype is dtype:
                    continue
            elif not isinstance(value, (list, tuple)):
                continue
            if at not in uncast:
                made = made or list(args)
                made[at] = _cast_argument(value, device, dtype, cast)
        given, args = args, made or args
        result = call(*args, **kwargs)
        for at in self._written:
            if args[at] is not given[at] and args[self._written[-1] + 1]:  # whether it trains
                given[at].copy_(args[at])
        if written_to is not None and result is not written_to:
            if "out" in kwargs:
                written_to.resize_(result.shape)
            return written_to.copy_(result)
        return result if decision.out is None else _back(result, decision.out)


def _cast_argument(
    value: Any, device: str, dtype: torch.dtype, cast: CastFunction = torch.Tensor.to
) -> Any:
    """Cast the eligible tensors of an argument."""
    if isinstance(value, torch.Tensor):
        if value.dtype is dtype or not eligible(value, device):
            return value
        return cast(value, dtype)
    if isinstance(value, (list, tuple)):
        return [_cast_argument(inner, device, dtype, cast) for inner in value]
    return value


def eligible(t: torch.Tensor, device: str) -> bool:
    """Return whether autocast casts a tensor in regions of a device."""
    return t.is_floating_point() and t.dtype is not torch.float64 and t.device.type == device


def _back(result: Any, out: str) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)(_back(r, out) for r in result)
    if isinstance(result, torch.Tensor) and result.dtype is torch.float32:
        return result.to(dtype_names.DTYPES[out])
    return result


def forbid(policy: Policy, row: Row, name: str, asked: Sequence[str]) -> NoReturn:
    """Raise the error of a forbidden op."""
    if row.rule is Rule.WIDEST:  # torch's message, from its own check
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    use = f"Use {row.instead}, or give it" if row.instead else "Give it"
    raise ForbiddenOpError(
        f"policy {policy.name!r} forbids {name!r}, called here with ({', '.join(asked)}). "
        f"{use} another rule in the policy."
    )
