"""Our kernels on torch's autocast keys: one function that asks the policy and does what it says.

Where a region's policy agrees with what torch compiled in, nothing of ours is installed. Where it
differs in some ops, those ops get a Python kernel on the device's autocast key, once, lazily; the
kernel asks the region in force and, if that region's policy agrees with torch after all, hands the
call to the kernel it replaced. torch.compile traces through it.

A second set of the same function stands in front of torch.func's transforms. vmap and grad take
composite ops such as linear apart before autocast sees them, so that a bias would stay float32 and
pull the result up; here the op is cast as a whole first.
"""

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.library import Library, get_kernel

from polymp.backends.torch.autocast import (
    cast_cache,
    checkpoint,
    op_facts,
    regions,
    torch_table,
    weight_cast_cache,
)
from polymp.backends.torch.autocast.run_op import Call, Ruling, Rulings, formats, plain, runner
from polymp.backends.torch.autocast.validate import check
from polymp.backends.torch.compat import accelerators, dispatcher, dynamo, modes
from polymp.errors import PolicyError
from polymp.rules import decisions
from polymp.rules.policy import Decision, Policy
from polymp.rules.region import Region
from polymp.rules.row import LOW, Rule
from polymp.rules.vocabulary import vocabulary

_libraries: dict[str, Library] = {}  # by namespace of the ops
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
        checkpoint.keep_policies()  # also before there is one: backward may run under the first
        if region.policy is not None:
            install(region.policy, region.device, region.format if region.enabled else "")
        if region.enabled:
            cast_cache.watch(region.device)
            install_for_transforms(region.device)
            for recording in _recordings:
                recording.cover(region.device)


def installed(device: str) -> tuple[str, ...]:
    """Ops of the device that have a kernel of ours on the autocast key, sorted."""
    return tuple(sorted(op for on, op in _installed if on == device))


def install(policy: Policy, device: str, format: str = "") -> None:
    """Put kernels on the ops in which `policy` differs from what torch does on the device.

    Args:
        policy: without rows that wait for a scope.
        device: whose autocast key.
        format: the one whose kernels are to be there; "" if that is not known yet.

    Raises:
        PolicyError: a row that torch cannot honour; nothing is installed then.
    """
    check(policy, device, format)
    checkpoint.keep_policies()
    put(device, sorted(differing(policy, device)))


def differing(policy: Policy, device: str) -> frozenset[str]:
    """The ops that need a kernel of ours under a policy; those that wait for a scope aside."""
    return frozenset(
        op
        for low in LOW
        for op in torch_table.kernels(device) | torch_table.table(policy, low).keys()
        if not torch_table.agrees(device, policy, op, low)
    )


@contextmanager
def all_python(*devices: str) -> Iterator[None]:
    """Run every op that has a rule on our kernels, the compiled ones unused. For tests.

    Args:
        devices: whose keys; all that have a table, if none is named.
    """
    for device in devices or torch_table.DEVICES:
        put(device, sorted(torch_table.kernels(device)))
    _compiled[0] = False
    try:
        yield
    finally:
        _compiled[0] = True


def put(device: str, ops: Sequence[str]) -> None:
    """Put our kernel on the device's autocast key for ops, once for each.

    Raises:
        PolicyError: the key cannot be named.
    """
    if dispatcher.autocast_key(device) is None:
        if ops:
            raise PolicyError(f"{device!r} can have no policy: torch hides its dispatch key.")
        return
    if device in _loans:
        _loans[device].wanted.update(_loans[device].ops.intersection(ops))
    for name in ops:
        _install(_library(name), device, [name])


def _install(library: Library, device: str, ops: Iterable[str]) -> None:
    """Put our kernel on the device's autocast key for ops that have none of ours."""
    key = str(dispatcher.autocast_key(device))
    for name in ops:
        kernel = None if (device, name) in _installed else _kernel_for(name, device, key)
        if kernel is not None:
            _front(name, only_numbers=True)
            dispatcher.put(library, name, kernel, key)
            _installed.add((device, name))


@dataclass
class _Loan:
    """Kernels on a device's key for as long as casts are held there.

    Attributes:
        blocks: how many blocks hold casts.
        library: of the kernels.
        ops: whose they are.
        wanted: those of them that were asked for to stay.
    """

    library: Library
    ops: set[str]
    blocks: int = 0
    wanted: set[str] = field(default_factory=set)


_loans: dict[str, _Loan] = {}


def lend(devices: Iterable[str]) -> None:
    """Put our kernels on every op that lowers on the devices: torch's own hold no casts.

    Each call is undone by one of `take_back`.
    """
    with _lock:
        for device in devices:
            cast_cache.watch(device)
            if device not in _loans:
                key = dispatcher.autocast_key(device)
                ops = {name for name in lowered(device) if (device, name) not in _installed}
                _loans[device] = loan = _Loan(Library("aten", "IMPL"), ops)
                _install(loan.library, device, sorted(ops) if key else ())
            _loans[device].blocks += 1


def take_back(devices: Iterable[str]) -> None:
    """Undo one `lend`. Kernels go when no block is open and no other thread can be in one."""
    with _lock:
        for device in devices:
            _loans[device].blocks -= 1
        if not _alone():  # whoever takes back next will look again
            return
        for device, loan in list(_loans.items()):
            if not loan.blocks:
                del _loans[device]
                dispatcher.destroy(loan.library)
                _installed.difference_update((device, name) for name in loan.ops)
                put(device, sorted(loan.wanted))


# Where a thread waits, in functions that call nothing of torch's.
_WAITING = frozenset({"threading", "queue", "selectors", "socket", "multiprocessing.connection"})


def _alone() -> bool:
    """True if no other thread of Python's can be on its way into a kernel."""
    mine = threading.get_ident()
    return all(
        thread == mine or frame.f_globals.get("__name__") in _WAITING
        for thread, frame in sys._current_frames().items()
    )


@cache
def lowered(device: str) -> frozenset[str]:
    """The ops that torch's own table of the device lowers, and our kernels can."""
    rows = (
        (name, torch_table.row(device, name, "bfloat16")) for name in torch_table.kernels(device)
    )
    return frozenset(
        name
        for name, row in rows
        if row is not None and row.rule is Rule.LOWER and name not in op_facts.COMPILED_ONLY
    )


@contextmanager
def _for_a_while(device: str, ops: Sequence[str]) -> Iterator[None]:
    """Our kernels on the device's autocast key for ops, taken away again after."""
    key = dispatcher.autocast_key(device)
    with dispatcher.temporary_library("aten") as library:
        for name in ops if key else ():
            kernel = _kernel_for(name, device, str(key))
            if kernel is not None and "::" not in name:
                _front(name, only_numbers=True)
                dispatcher.put(library, name, kernel, str(key))
        yield


def _kernel_for(name: str, device: str, key: str) -> Call | None:
    op = dispatcher.overload(name)
    if op is None or name in op_facts.UNTOUCHED:
        return None
    replaced = _compiled_kernel(name, key) if name in torch_table.kernels(device) else None
    return _autocast_kernel(op, name, device, key, replaced)


@cache
def _compiled_kernel(name: str, key: str) -> Any:
    """torch's own kernel on the key; read once, before there is one of ours."""
    op = dispatcher.overload(name)
    assert op is not None, "torch registers what it has"
    return get_kernel(op, key)


def _library(name: str) -> Library:
    space = name.rpartition("::")[0] or "aten"
    if space not in _libraries:
        _libraries[space] = Library(space, "IMPL")
    return _libraries[space]


def _autocast_kernel(
    op: torch._ops.OpOverload, name: str, device: str, key: str, replaced: Any
) -> Call:
    excluded = dispatcher.keyset(key)
    pass_on, call = dispatcher.passing_on(op, key), dispatcher.calling(op)
    run = runner(op, name, device)
    rulings = Rulings(name, device)
    compiled_only = name in op_facts.COMPILED_ONLY
    writes = op._schema.is_mutable
    if writes:
        cast_cache.watch(
            device
        )  # puts kernels on such ops, which ours replaces and does the work of

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if writes:
            cast_cache.writing(args[0])
        ruling = rulings.of(regions.in_force(device))
        if (found := decisions.current()) is not None:
            entry = _entry(op, name, device, ruling, args)
            return found.around(entry, as_ruled, ruling, keys, args, kwargs)
        return as_ruled(ruling, keys, args, kwargs)

    def as_ruled(ruling: Ruling, keys: torch._C.DispatchKeySet, args: Any, kwargs: Any) -> Any:
        row = ruling.row
        holds = weight_cast_cache.weights and row is not None and row.rule is Rule.LOWER
        if (
            ruling.agrees
            and replaced is not None
            and (
                compiled_only
                or (
                    _compiled[0]
                    and not (holds and not cast_cache.kept_by_torch((*args, *kwargs.values())))
                )
            )
        ):
            return replaced.call_boxed(keys, *args, **kwargs)
        if row is None:  # as if autocast had not heard of the op; ops inside it count
            return pass_on(keys, args, kwargs)
        with dispatcher.ExcludeKeys(excluded):
            if row.rule is Rule.KEEP:
                return call(*args, **kwargs)
            if row.rule is Rule.FORBID and ruling.agrees:
                return replaced.call_boxed(keys, *args, **kwargs)  # raises in torch's words
            return run(ruling, cast_cache.cast, call, args, kwargs)

    return dynamo.no_frame(kernel, inside=True)


def _entry(
    op: torch._ops.OpOverload, name: str, device: str, ruling: Ruling, args: Sequence[Any]
) -> decisions.Entry:
    asked, region, row = tuple(formats(op, device, args)), ruling.region, ruling.row
    parts = Decision(Rule.PARTS)
    decision = parts if row is None else ruling.policy.apply(row, asked, region.format)
    at = "torch", vocabulary().of_aten(name), f"aten:{name}", region.format, region.scope
    return decisions.Entry(*at, row, asked, decision, ruling.policy.name)


class _Recording:
    """Kernels of ours on every op, for as long as a record is made: compiled ones tell nothing.

    They are put on a device's key when the device comes into question, for it takes a while.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.devices: set[str] = set()

    def cover(self, device: str) -> None:
        """Put kernels on a device's key, once."""
        if device in self.devices or device not in torch_table.DEVICES:
            return
        self.devices.add(device)
        lend((device,))  # so that no block takes its kernels back meanwhile
        self.stack.callback(take_back, (device,))
        named = {overload for op in vocabulary().ops.values() for overload in op.aten}
        missing = sorted(n for n in named if (device, n) not in _installed)
        self.stack.enter_context(_for_a_while(device, missing))


_recordings: list[_Recording] = []


@contextmanager
def _recorded() -> Iterator[None]:
    """A recording of what runs on devices that are here, or that regions have spoken of."""
    with ExitStack() as stack:
        made = _Recording(stack)
        with _lock:
            fakes = modes.innermost_mode() is not None
            known = {region.device for region, *_ in regions.known.values()}
            for device in torch_table.DEVICES:
                if fakes or device in known or accelerators.is_here(device):
                    made.cover(device)
            _recordings.append(made)
        stack.callback(_recordings.remove, made)
        yield


decisions.preparations.append(_recorded)


def install_for_transforms(device: str) -> None:
    """Put kernels in front of torch.func's transforms for the ops of the device's table."""
    if device in _fronted:
        return
    for name in sorted(torch_table.kernels(device) | _BATCHED_AS_PRODUCTS):
        _front(name)
    _fronted.add(device)


def _front(name: str, only_numbers: bool = False) -> None:
    """Put our kernel in front of torch.func's transforms for an op.

    Args:
        name: the op.
        only_numbers: True to leave it out if a number cannot stand for a tensor in the op. Behind
            a transform such a number cannot be read: an op with a kernel of ours needs both.
    """
    op = dispatcher.overload(name)
    if op is None or name in _fronted_ops or (only_numbers and len(dispatcher.tensors_of(op)) < 2):
        return
    front = get_kernel(op, dispatcher.FUNC_FRONT)
    dispatcher.put(_library(name), name, _front_kernel(op, name, front), dispatcher.FUNC_FRONT)
    _fronted_ops.add(name)


def _wrapped(places: Sequence[int], args: Sequence[Any]) -> Sequence[Any]:
    """The arguments, with a tensor for every number in the place of one, as torch wraps them."""
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


def _front_kernel(op: torch._ops.OpOverload, name: str, front: Any) -> Call:
    rulings = {device: Rulings(name, device) for device in torch_table.DEVICES}
    places = dispatcher.tensors_of(op)

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return front.call_boxed(keys, *args, **kwargs)

        device = _device(args)
        args = tuple(_wrapped(places, args))
        if device not in rulings or not torch.is_autocast_enabled(device) or not regions.entered():
            return call(*args, **kwargs)
        ruling = rulings[device].of(regions.in_force(device))
        row = ruling.row
        if row is None and name not in _BATCHED_AS_PRODUCTS:
            return call(*args, **kwargs)
        if ruling.agrees and name in op_facts.COMPILED_ONLY:
            return call(*args, **kwargs)
        key = dispatcher.autocast_key(device)
        if key is None or (row is not None and row.rule is Rule.FORBID):
            return call(*args, **kwargs)  # torch's kernel, or ours behind it, says no
        with dispatcher.ExcludeKeys(dispatcher.keyset(key)):
            if row is None:
                return call(*args, **kwargs)
            run = runner(op, name, device)
            if (found := decisions.current()) is not None:
                entry = _entry(op, name, device, ruling, args)
                return found.around(entry, run, ruling, plain, call, args, kwargs)
            return run(ruling, plain, call, args, kwargs)

    return dynamo.no_frame(kernel, inside=True)


def _device(args: Sequence[Any]) -> str | None:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device.type
        if isinstance(arg, (list, tuple)) and (found := _device(arg)):
            return found
    return None
