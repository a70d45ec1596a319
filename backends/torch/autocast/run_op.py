"""One op, run by its row: the decision of the policy, and the casts that follow from it.

A `Ruling` is the decision for an op in a region, worked out once; `runner` makes the function that
casts and calls. The kernels in `autocast_kernel` and `front_kernel` call both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import torch

from polymp.backends.torch.autocast import (
    dtype_names,
    fp8_ops,
    layer_norm,
    op_facts,
    recurrent,
    torch_table,
)
from polymp.backends.torch.autocast.validate import APPENDED, dtype_at
from polymp.backends.torch.compat import dispatcher
from polymp.errors import ForbiddenOpError
from polymp.fp8.recipes import RECIPES
from polymp.rules.answers import Decision
from polymp.rules.policy import Policy
from polymp.rules.region import Region
from polymp.rules.row import LOW, Apply, Row, Rule
from polymp.rules.vocabulary import vocabulary

Function = Callable[..., Any]
Cast = Callable[[torch.Tensor, torch.dtype, torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ruling:
    """The decision for one op in one region.

    Attributes:
        region: the region.
        policy: its own, or torch's table of the device.
        row: the row that won; None if the policy has no row for the op.
        agrees: True if torch's compiled kernel does the same.
        how: how the op is made to run in float32 under rule fp32.
        decision: the decision, if it does not depend on the dtypes of the inputs; else None.
        mul: the row for calls in which a product adds nothing up; None if `row` holds for all.
    """

    region: Region
    policy: Policy
    row: Row | None
    agrees: bool
    how: Apply
    decision: Decision | None
    mul: Row | None = None

    def decided(self, op: torch._ops.OpOverload, name: str, device: str, args: Any) -> Decision:
        """Return the decision for a call."""
        if self.mul is not None and not op_facts.adds_up(name, args):
            asked = dtypes(op, device, args)
            return self.policy.apply(self.mul, asked, self.region.dtype)._replace(rule=Rule.LOWER)
        if self.decision is not None:
            return self.decision
        assert self.row is not None, "an op without a row is not run by one"
        return self.policy.apply(self.row, dtypes(op, device, args), self.region.dtype)


class Rulings:
    """The rulings of one op on one device, by region: a kernel asks at every call.

    Regions that are in force are kept for the life of the process, so each is known by its
    identity.
    """

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self.device = device
        self.known: dict[int, Ruling] = {}

    def of(self, region: Region) -> Ruling:
        """The ruling in a region."""
        found = self.known.get(id(region))
        if found is None or found.region is not region:
            found = self.known[id(region)] = self._made(region)
        return found

    def _made(self, region: Region) -> Ruling:
        name, device, dtype = self.name, self.device, region.dtype
        if region.policy is None:
            policy, row = torch_table.policy(device), torch_table.row(device, name, dtype)
            agrees = "::" not in name
        else:
            policy, row = region.policy, torch_table.table(region.policy, dtype, device).get(name)
            agrees = torch_table.agrees(device, policy, name, dtype)
        how, decision, mul = Apply.CAST, None, None
        if row is not None:
            how = _way(row, device, name, dtype)
            if row.rule in (Rule.LOWER, Rule.FP8, Rule.FP32, Rule.KEEP):
                decision = policy.apply(row, (), dtype)
            if region.policy is not None:
                mul = torch_table.as_mul(device, policy, name, dtype)
        return Ruling(region, policy, row, agrees, how, decision, mul)


def _way(row: Row, device: str, name: str, dtype: str) -> Apply:
    """Return how fp32 is applied: as the row says, as the device's table does, or by a cast."""
    if row.rule is not Rule.FP32:
        return Apply.CAST
    own = torch_table.row(device, name, dtype)
    if own is not None and own.rule is Rule.FP32:
        return row.apply or own.apply or Apply.CAST
    op = vocabulary().ops.get(vocabulary().of_aten(name))
    return row.apply or Apply(op.fp32 if op and op.fp32 else "cast")


@cache
def _consulted(op: torch._ops.OpOverload) -> tuple[bool, ...]:
    """Return for each argument whether its dtype counts for a rule, as in torch's `prioritize`.

    Tensors count that may not be left out.
    """
    return tuple(str(a.type) in ("Tensor", "List[Tensor]") for a in op._schema.arguments)


def dtypes(op: torch._ops.OpOverload, device: str, args: Sequence[Any]) -> list[str]:
    """Return the dtypes of the inputs that count for a rule, in order."""
    return [
        dtype_names.NAMES[t.dtype]
        for arg, ask in zip(args, _consulted(op), strict=False)
        if ask
        for t in (arg if isinstance(arg, (list, tuple)) else (arg,))
        if isinstance(t, torch.Tensor) and t.device.type == device and t.is_floating_point()
    ]


@cache
def runner(op: torch._ops.OpOverload, name: str, device: str) -> Function:
    """Make a function that runs an op by a ruling, on the device, with autocast excluded.

    It takes the ruling, a cast, the function to call, and the arguments.
    """
    schema = op._schema.arguments
    in_float32, words = op_facts.in_float32(name), vocabulary()
    own_kernel = layer_norm.kernel(name, device)
    picks = words.picks(words.of_aten(name))
    # Batch norm writes its running statistics, though its schema does not say so: what is
    # written to a cast is copied back. Its kernels take a low input beside float32 statistics.
    written = {at for at, a in enumerate(schema) if a.name.startswith("running_")}
    with_low_input = set(range(1, len(schema))) if written else set()
    prepare = recurrent.prepare(name, device)

    def run(ruling: Ruling, cast: Cast, call: Function, args: Any, kwargs: Any) -> Any:
        if ruling.how is not Apply.CAST:
            return _by_dtype(op, name, device, ruling.how, call, args, kwargs)
        decision = ruling.decided(op, name, device, args)
        if ruling.decision is None:
            if decision.rule is Rule.FORBID:
                forbid(ruling.policy, ruling.row, name, dtypes(op, device, args))
            if in_float32 and decision.out in LOW:
                if own_kernel is not None:
                    return own_kernel(*args, **kwargs)
                decision = Decision(decision.rule, decision.out)
        if decision.run == "float32" and kwargs.get("dtype") is not None:
            decision = Decision(decision.rule)  # the caller's own dtype wins, as in torch
        if decision.rule is Rule.FP8:
            recipe = RECIPES[ruling.policy.fp8]
            if not fp8_ops.why_not(name, ruling.region, recipe, args, kwargs):
                return fp8_ops.run(name, recipe, args, kwargs)
        if picks and decision.run is not None and decision.rule is not Rule.FP32:
            dtype = dtype_names.DTYPES[decision.out or decision.run]
            if device == "cpu" and torch.is_grad_enabled() and args[0].requires_grad:
                # Kernels of backward there add up in the dtype of the input.
                args = [_cast(args[0], device, torch.float32, dtype, plain), *args[1:]]
            return _cast(call(*args, **kwargs), device, dtype, dtype, plain)
        if decision.run is not None:
            dtype, low = dtype_names.DTYPES[decision.run], dtype_names.DTYPES[ruling.region.dtype]
            uncast = () if dtype is torch.float32 else with_low_input
            if prepare is not None:
                args = prepare(args, dtype)
            # Last first, as torch's compiled kernels come to do it: autograd adds gradients up in
            # the order in which the casts were made.
            if kwargs:
                pairs = reversed(kwargs.items())
                kwargs = {key: _cast(value, device, dtype, low, cast) for key, value in pairs}
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
                    made[at] = _cast(value, device, dtype, low, cast)
            given, args = args, made or args
            result = call(*args, **kwargs)
            for at in written:
                if args[at] is not given[at] and args[max(written) + 1]:  # whether it trains
                    given[at].copy_(args[at])
        else:
            result = call(*args, **kwargs)
        return result if decision.out is None else _back(result, dtype_names.DTYPES[decision.out])

    return run


def plain(t: torch.Tensor, dtype: torch.dtype, low: torch.dtype) -> torch.Tensor:
    """Cast without keeping the result."""
    return t.to(dtype)


def _cast(value: Any, device: str, dtype: torch.dtype, low: torch.dtype, cast: Cast) -> Any:
    """Cast the eligible tensors of an argument."""
    if isinstance(value, torch.Tensor):
        if value.dtype is dtype or not _eligible(value, device):
            return value
        return cast(value, dtype, low)
    if isinstance(value, (list, tuple)):
        return [_cast(inner, device, dtype, low, cast) for inner in value]
    return value


def _eligible(t: torch.Tensor, device: str) -> bool:
    return t.is_floating_point() and t.dtype is not torch.float64 and t.device.type == device


def _by_dtype(
    op: torch._ops.OpOverload,
    name: str,
    device: str,
    how: Apply,
    call: Function,
    args: Any,
    kwargs: Any,
) -> Any:
    """Run an op in float32 by its dtype argument, or by the overload that has such an argument."""
    schema = op._schema.arguments
    ok = isinstance(args[0], torch.Tensor) and _eligible(args[0], device)
    if how is Apply.APPEND_DTYPE:
        longer = dispatcher.overload(APPENDED[name])
        dtype = torch.float32 if ok else args[0].dtype
        rest = schema[len(args) :]  # defaults are left out of a call; this one has none
        filled = {a.name: kwargs.get(a.name, a.default_value) for a in rest}
        return longer(*args, **filled, dtype=dtype)  # type: ignore[misc]
    at = dtype_at(op)
    assert at is not None, "a policy is checked for it"
    given = kwargs.get("dtype") if at >= len(args) else args[at]
    if ok and given is None:
        args, kwargs = args[:at], {**kwargs, "dtype": torch.float32}
    return call(*args, **kwargs)


def _back(result: Any, dtype: torch.dtype) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)(_back(r, dtype) for r in result)
    if isinstance(result, torch.Tensor) and result.dtype is torch.float32:
        return result.to(dtype)
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
