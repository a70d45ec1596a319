"""`locate`: replay a step that broke, and name the op that broke it.

The step runs once more under a tracer that also measures what every op is given. What it writes is
put back when it is over, so that a run can go on as if nobody had looked.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polymp.backends.torch.compat import dispatcher, distributed, modes, storage
from polymp.backends.torch.diagnostics.audit import Measures
from polymp.backends.torch.scaler.grad_scaler import GradScaler
from polymp.backends.torch.scaler.properties import PARTS
from polymp.diagnostics.audit_records import Fault


def locate(
    step_fn: Callable[..., Any], *args: object, model: nn.Module | None = None, **kwargs: object
) -> Fault | None:
    """The op at which a step's numbers broke: where the first value that is not finite came from.

        if not loss.isfinite():
            print(polymp.torch.locate(train_step, batch))

    Calls `step_fn(*args, **kwargs)` once more, with everything measured, and follows what is not
    finite at its end, be it the loss or a gradient, back to the op that made it: because its
    dtype's range was too small, because a number or a value before it became zero in its dtype,
    because an input was not finite, or because the operation itself has no finite result there.
    The fault names the row of the policy that decided, and what the op was given. Infinities that a
    program means and takes up again, such as those of a mask, are no fault.

    Tensors that the step writes in place, `.grad` of leaves, the states of torch's optimizers, loss
    scalers (torch.amp's and polymp's) and torch's random numbers are afterwards as they were. Other
    objects that it changes are not put back.

    A step that talks to other ranks, as one of DistributedDataParallel or FSDP does, is replayed by
    all of them: call `locate` on every rank.

    Args:
        step_fn: does the step, or its forward pass alone.
        args: of the call.
        model: whose modules and parameters are called by their names; found among `args`, or
            `step_fn` itself, where it is a module.
        kwargs: of the call.

    Returns:
        The fault; None if everything that the step made is finite.

    Raises:
        TypeError: `step_fn` is not callable.
        RuntimeError: the step talks to other ranks, and they did not all call `locate`. The step
            is given up before it talks, so that the run can go on.
        Exception: what the step raises, if no fault was found in what ran before it.
    """
    if not callable(step_fn):
        raise TypeError(f"locate(step_fn, *args) needs a function, got {step_fn!r}.")
    if model is None:
        leaves = (step_fn, *tree_leaves((args, kwargs)))
        model = next((leaf for leaf in leaves if isinstance(leaf, nn.Module)), None)
    tracer = Measures(model, operands=True)
    with _put_back():
        try:
            with tracer:
                step_fn(*args, **kwargs)
        except Exception:
            fault = tracer.fault()
            if fault is None:
                raise
            return fault
        return tracer.fault()


class _Undo(TorchDispatchMode):
    """Keeps what ops are about to write into memory that was there before."""

    def __init__(self, meeting: "_Meeting") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meeting = meeting
        self.made: set[int] = set()
        self.written: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        self.grads: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for t in given:
            if t.is_leaf and t.requires_grad:
                self.grads.setdefault(id(t), (t, t.grad))
        if modes.unwrapped_first(types):
            return NotImplemented
        if distributed.talks(func):
            self.meeting.wait(func.name())
        if dispatcher.writes(func):
            for t in dispatcher.written(func, args, kwargs):
                key = storage.storage_key(t)
                if key and key not in self.made and key not in self.written:
                    memory = t.untyped_storage()
                    self.written[key] = memory, _bytes(memory).clone()
        result = func(*args, **kwargs)
        before = {storage.storage_key(t) for t in given}
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and storage.storage_key(t) not in before:
                self.made.add(storage.storage_key(t))
        return result

    def put_back(self) -> None:
        """Give all of it the values that it had."""
        with torch.no_grad():
            for memory, was in self.written.values():
                if memory.nbytes() >= was.nbytes:  # less has been freed, as FSDP does
                    _bytes(memory)[: was.nbytes].copy_(was)
        for t, grad in self.grads.values():
            t.grad = grad


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Memory as a tensor of its bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Meeting:
    """Keeps a replay from talking to ranks that do not replay, which would not answer.

    The first op of a replay that talks waits until all ranks have come to theirs. They count
    themselves in the store of the default process group; whoever gives up takes itself out.
    """

    patience = timedelta(seconds=60)

    def __init__(self) -> None:
        self._met = not (dist.is_available() and dist.is_initialized())

    def module(self, module: nn.Module, _: Any) -> None:
        """Before a forward pass: wrappers that give up halfway through talking cannot go on."""
        if distributed.will_talk(module):
            self.wait(f"a call of {type(module).__name__}")

    def wait(self, what: str) -> None:
        """Wait for the other ranks, once.

        Raises:
            RuntimeError: they did not come.
        """
        ranks = 1 if self._met else dist.get_world_size()
        self._met = True
        if ranks == 1:
            return
        store = dist.distributed_c10d.PrefixStore("polymp.locate", distributed.default_store())
        came = store.add("came", 1)
        meeting = -(-came // ranks)
        full, all_came = meeting * ranks, f"all came to {meeting}"
        if came == full:
            store.set(all_came, "")
            return
        try:
            store.wait([all_came], self.patience)
        except RuntimeError:  # a file store raises no DistStoreError
            came = store.add("came", -1) + 1
            if came == full:  # the last one came in this moment
                store.add("came", 1)
                return
            raise RuntimeError(
                f"locate() replays a step that talks to other ranks ({what}), and "
                f"{came + ranks - full} of {ranks} ranks called it within "
                f"{self.patience.total_seconds():g} seconds. Call it on every rank: let them agree "
                "first, for example by an all_reduce of loss.isfinite(). Or replay what one rank "
                "can do alone, for example the forward pass of model.module."
            ) from None


def _scalers() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The attributes of all loss scalers that there are, each beside a copy of them."""
    found = []
    for it in gc.get_objects():
        if issubclass(type(it), _SCALERS):
            own = vars(it)
            found.append((own, {name: _copied(value) for name, value in own.items()}))
    return found


_SCALERS = (torch.amp.GradScaler, GradScaler, *PARTS)


def _copied(value: Any) -> Any:
    """A dict of a scaler with those in it copied, too; else the value."""
    if not isinstance(value, dict):
        return value
    copy = value.copy()
    copy.update((key, _copied(inner)) for key, inner in value.items())
    return copy


@contextmanager
def _put_back() -> Iterator[None]:
    """Run code, and put back what it wrote."""
    optimizers: dict[int, tuple[Any, Any, Any]] = {}

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        states = {p: dict(state) for p, state in optimizer.state.items()}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        optimizers.setdefault(id(optimizer), (optimizer, states, groups))

    scalers = _scalers()
    hook = register_optimizer_step_pre_hook(keep)
    meeting = _Meeting()
    before_modules = register_module_forward_pre_hook(meeting.module)
    undo, devices = _Undo(meeting), range(torch.cuda.device_count())
    try:
        with torch.random.fork_rng(devices), undo:
            yield
    finally:
        hook.remove()
        before_modules.remove()
        undo.put_back()
        for own, attributes in scalers:
            own.clear()
            own.update(attributes)
        for optimizer, states, groups in optimizers.values():
            optimizer.state.clear()
            optimizer.state.update(states)
            for group, was in zip(optimizer.param_groups, groups, strict=True):
                group.update(was)
