"""Our kernels on torch's autocast keys: one function that asks the policy and does what it says.

Where a region's policy agrees with what torch compiled in, nothing of ours is installed. Where it
differs in some ops, those ops get a Python kernel on the device's autocast key, once, lazily; the
kernel asks the region in force and, if that region's policy agrees with torch after all, hands the
call to the kernel it replaced. torch.compile traces through it.

A second set of the same function stands in front of torch.func's transforms. vmap and grad take
composite ops such as linear apart before autocast sees them, so that a bias would stay float32 and
pull the result up; here the op is cast as a whole first.
"""

import difflib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.library import Library, get_kernel

from polymp.backends.torch import casts, compat, native, regions
from polymp.errors import ForbiddenOpError, PolicyError
from polymp.region import Region
from polymp.rules import Apply, Policy, Row, Rule

Call = Callable[..., Any]

_library = Library("aten", "IMPL")
_installed: set[tuple[str, str]] = set()  # (device, op) with a kernel on the autocast key
_fronted: set[str] = set()  # devices whose ops have a kernel in front of torch.func
_fronted_ops: set[str] = set()

# Batched, these become matmul, which has a rule, whether or not they have one themselves.
_BATCHED_AS_PRODUCTS = frozenset({"mv", "dot", "vdot", "addmv", "addr"})
_lock = threading.RLock()
_compiled = [True]  # False: compiled kernels are not used even where they agree (tests)


def prepare(region: Region) -> None:
    """What has to be done once before a region like this can be entered.

    Raises:
        PolicyError: the policy has a rule that torch cannot honour.
    """
    with _lock:
        if region.policy is not None:
            install(region.policy, region.device)
        if region.enabled:
            casts.watch(region.device)
            install_for_transforms(region.device)


def installed(device: str) -> tuple[str, ...]:
    """Ops of the device that have a kernel of ours on the autocast key, sorted."""
    return tuple(sorted(op for on, op in _installed if on == device))


def install(policy: Policy, device: str) -> None:
    """Put kernels on the ops in which `policy` differs from what torch does on the device.

    Raises:
        PolicyError: a row that torch cannot honour; nothing is installed then.
    """
    ops = native.kernels(device) | policy.table.keys()
    differ = [op for op in ops if not native.agrees(device, policy, op)]
    for op in differ:
        if op in policy.table:
            _check(policy, policy.table[op])
    _put(device, differ)


@contextmanager
def all_python(*devices: str) -> Iterator[None]:
    """Run every op that has a rule on our kernels, the compiled ones unused. For tests.

    Args:
        devices: whose keys; all that have a table, if none is named.
    """
    for device in devices or native.DEVICES:
        _put(device, sorted(native.kernels(device)))
    _compiled[0] = False
    try:
        yield
    finally:
        _compiled[0] = True


def _put(device: str, ops: Sequence[str]) -> None:
    key = compat.autocast_key(device)
    if key is None:
        if ops:
            raise PolicyError(f"{device!r} can have no policy: torch hides its dispatch key.")
        return
    for name in ops:
        op = compat.overload(name)
        if (device, name) in _installed or op is None:
            continue
        had = name in native.kernels(device)
        replaced = get_kernel(op, key) if had else None
        compat.put(_library, name, _autocast_kernel(op, name, device, key, replaced), key)
        _installed.add((device, name))


def _check(policy: Policy, row: Row) -> None:
    op = compat.overload(row.op)
    if op is None:
        raise PolicyError(
            f"policy {policy.name!r} has a rule for {row.op!r}, which is no op of torch"
            f"{_hint(row.op)}."
        )
    if op._schema.is_mutable:
        raise PolicyError(
            f"policy {policy.name!r} has a rule for {row.op!r}, which writes into an argument: "
            "the format of its result is given. Give the rule to the op without '_' or out=."
        )
    if not any("Tensor" in str(a.type) for a in op._schema.arguments):
        raise PolicyError(
            f"policy {policy.name!r} has a rule for {row.op!r}, which takes no tensor"
            f"{_hint(row.op)}."
        )
    if row.apply is Apply.DTYPE_ARGUMENT and _dtype_at(op) is None:
        raise PolicyError(
            f"policy {policy.name!r} applies fp32 to {row.op!r} by its dtype argument, "
            f"which it does not have: {op._schema}"
        )
    if row.apply is Apply.APPEND_DTYPE and row.op not in _APPENDED:
        raise PolicyError(
            f"policy {policy.name!r} applies fp32 to {row.op!r} by an appended dtype, "
            f"which only {', '.join(_APPENDED)} can have."
        )


def _hint(name: str) -> str:
    """What may have been meant by an op's name."""
    base = name.partition(".")[0]
    packet = getattr(torch.ops.aten, base, None)
    if packet is not None:
        names = [base if o == "default" else f"{base}.{o}" for o in packet.overloads()]
        return f"; its overloads are {', '.join(names)}"
    known = {row.op for device in native.DEVICES for row in native.policy(device).rows}
    close = difflib.get_close_matches(base.removeprefix("aten::"), sorted(known), n=3)
    return f"; did you mean {', '.join(close)}" if close else ""


def _autocast_kernel(
    op: torch._ops.OpOverload, name: str, device: str, key: str, replaced: Any
) -> Call:
    excluded = compat.keyset(key)
    pass_on = compat.passing_on(op, key)
    run = _runner(op, name, device)

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        region = regions.in_force(device)
        policy, row = _ruling(region, device, name)
        agrees = region.policy is None or native.agrees(device, policy, name)
        if replaced is not None and _compiled[0] and agrees:
            return replaced.call_boxed(keys, *args, **kwargs)
        if row is None:  # as if autocast had not heard of the op; ops inside it count
            return pass_on(keys, args, kwargs)
        with compat.ExcludeKeys(excluded):
            if row.rule is Rule.FORBID and row == native.row(device, name):
                return replaced.call_boxed(keys, *args, **kwargs)  # raises in torch's words
            return run(row, policy, region, casts.cast, op, args, kwargs)

    return kernel


def _ruling(region: Region, device: str, name: str) -> tuple[Policy, Row | None]:
    """The policy of a region and its row for the op; torch's, as far as this torch has it."""
    if region.policy is None:
        return native.policy(device), native.row(device, name)
    return region.policy, region.policy.table.get(name)


def install_for_transforms(device: str) -> None:
    """Put kernels in front of torch.func's transforms for the ops of the device's table."""
    if device in _fronted:
        return
    for name in sorted(native.kernels(device) | _BATCHED_AS_PRODUCTS):
        op = compat.overload(name)
        if op is None or name in _fronted_ops:
            continue
        front = get_kernel(op, compat.FUNC_FRONT)
        compat.put(_library, name, _front_kernel(op, name, front), compat.FUNC_FRONT)
        _fronted_ops.add(name)
    _fronted.add(device)


def _front_kernel(op: torch._ops.OpOverload, name: str, front: Any) -> Call:
    def plain(t: torch.Tensor, dtype: torch.dtype, low: torch.dtype) -> torch.Tensor:
        return t.to(dtype)

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return front.call_boxed(keys, *args, **kwargs)

        device = _device(args)
        if device is None or not torch.is_autocast_enabled(device) or not regions.entered():
            return call(*args, **kwargs)
        region = regions.in_force(device)
        policy, row = _ruling(region, device, name)
        if row is None and name not in _BATCHED_AS_PRODUCTS:
            return call(*args, **kwargs)
        key = compat.autocast_key(device)
        if key is None or (row is not None and row.rule is Rule.FORBID):
            return call(*args, **kwargs)  # torch's kernel, or ours behind it, says no
        with compat.ExcludeKeys(compat.keyset(key)):
            if row is None:
                return call(*args, **kwargs)
            return _runner(op, name, device)(row, policy, region, plain, call, args, kwargs)

    return kernel


def _device(args: Sequence[Any]) -> str | None:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device.type
        if isinstance(arg, (list, tuple)) and (found := _device(arg)):
            return found
    return None


Cast = Callable[[torch.Tensor, torch.dtype, torch.dtype], torch.Tensor]

# Overloads with the same meaning and a dtype at the end, for Apply.APPEND_DTYPE.
_APPENDED = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}


@cache
def _runner(op: torch._ops.OpOverload, name: str, device: str) -> Call:
    """A function that runs `op` as a row says, on the device, with autocast excluded."""
    schema = op._schema.arguments
    consulted = [str(a.type) in ("Tensor", "List[Tensor]") for a in schema]
    dtype_at = _dtype_at(op)
    # Batch norm writes its running statistics, though its schema does not say so: a cast of them
    # would take the write. Its kernels take a low input beside float32 weights and statistics.
    written = {at for at, a in enumerate(schema) if a.name.startswith("running_")}
    with_low_input = set(range(1, len(schema))) if written else set()

    def eligible(t: Any) -> bool:
        return (
            isinstance(t, torch.Tensor)
            and t.device.type == device
            and t.is_floating_point()
            and t.dtype is not torch.float64
        )

    def run(
        row: Row, policy: Policy, region: Region, cast: Cast, call: Call, args: Any, kwargs: Any
    ) -> Any:
        if row.apply is not Apply.CAST:
            ok = eligible(args[0])
            if row.apply is Apply.APPEND_DTYPE:
                longer = compat.overload(_APPENDED[name])
                dtype = torch.float32 if ok else args[0].dtype
                rest = schema[len(args) :]  # defaults are left out of a call; this one has none
                filled = {a.name: kwargs.get(a.name, a.default_value) for a in rest}
                return longer(*args, **filled, dtype=dtype)  # type: ignore[misc]
            assert dtype_at is not None
            given = kwargs.get("dtype") if dtype_at >= len(args) else args[dtype_at]
            if ok and given is None:
                args, kwargs = args[:dtype_at], {**kwargs, "dtype": torch.float32}
            return call(*args, **kwargs)
        formats = [
            regions.FORMATS[t.dtype]
            for arg, ask in zip(args, consulted, strict=False)
            if ask
            for t in (arg if isinstance(arg, (list, tuple)) else (arg,))
            if isinstance(t, torch.Tensor) and t.device.type == device and t.is_floating_point()
        ]
        decision = policy.decide(name, formats, region)
        if decision.rule is Rule.FORBID:
            _forbid(policy, row, formats)
        if decision.run is not None:
            dtype, low = regions.DTYPES[decision.run], regions.DTYPES[region.format]
            uncast = written if dtype is torch.float32 else with_low_input

            def lowered(value: Any) -> Any:
                if isinstance(value, (list, tuple)):
                    return [lowered(v) for v in value]
                return cast(value, dtype, low) if eligible(value) else value

            # Last first, as torch's compiled kernels come to do it: autograd adds gradients up in
            # the order in which the casts were made.
            kwargs = {k: lowered(v) for k, v in reversed(kwargs.items())}
            last_first = reversed(list(enumerate(args)))
            args = [a if at in uncast else lowered(a) for at, a in last_first][::-1]
        result = call(*args, **kwargs)
        return result if decision.out is None else _back(result, regions.DTYPES[decision.out])

    return run


def _back(result: Any, dtype: torch.dtype) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)(_back(r, dtype) for r in result)
    if isinstance(result, torch.Tensor) and result.dtype is torch.float32:
        return result.to(dtype)
    return result


def _forbid(policy: Policy, row: Row, formats: Sequence[str]) -> None:
    if row.rule is Rule.WIDEST:  # torch's message, from its own check
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    use = f"Use {row.instead}, or give it" if row.instead else "Give it"
    raise ForbiddenOpError(
        f"policy {policy.name!r} forbids {row.op!r}, called here with ({', '.join(formats)}). "
        f"{use} another rule in the policy."
    )


def _dtype_at(op: torch._ops.OpOverload) -> int | None:
    for at, argument in enumerate(op._schema.arguments):
        if argument.name == "dtype":
            return at
    return None
