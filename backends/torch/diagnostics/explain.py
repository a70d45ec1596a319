"""`explain`: which op ran in which dtype, and why.

report = polymp.torch.explain(model, x, dtype=torch.bfloat16)
with polymp.torch.explain() as report: ...      # forward, backward, any code
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, overload

import torch
import torch.nn as nn

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.autocast.api import PolicyLike, autocast
from polymp.backends.torch.compat import dispatcher, modes, tree_leaves
from polymp.backends.torch.diagnostics.op_call import Ran, call_of
from polymp.backends.torch.diagnostics.op_stream import OpStream, Subscriber
from polymp.backends.torch.modules.scoped import scoped_anew
from polymp.backends.torch.snapshot import training_objects
from polymp.backends.torch.weights.freeze_usage import device_of
from polymp.diagnostics.call_record import Call
from polymp.diagnostics.report import Report
from polymp.errors import brief
from polymp.rules import policy_files
from polymp.rules.row import LOW


class _Kept(Subscriber):
    """Counts what is kept for backward."""

    def __init__(self) -> None:
        # By storage: a reference to it, the node that saved it, and its bytes.
        self._saved: dict[int, tuple[Any, int, int]] = {}
        self._leaves: set[int] = set()

    def before(self, ran: Ran) -> None:
        for t in ran.reads:
            if t.is_leaf and t.requires_grad:
                self._leaves.add(modes.storage_key(t))

    def begin(self) -> None:
        dispatcher.saved_tensors_shown(self.stream, self._save)

    def _save(self, t: torch.Tensor) -> None:
        base = t if t._base is None else t._base
        if isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad):
            return
        key = modes.storage_key(t)
        if t.dtype is torch.float32 and key and key not in self._saved:
            reference = modes.storage_reference(t)  # so that the key is not another's meanwhile
            size = t.untyped_storage().nbytes()
            self._saved[key] = reference, dispatcher.latest_node(), size

    def finished(self) -> list[Call]:
        """Return the calls, once the program has run."""
        for key, (_, node, size) in self._saved.items():
            maker = self.stream.maker(node)
            if key not in self._leaves and maker is not None:
                maker.kept += size
        return [call_of(op_call) for op_call in self.stream.calls]


@contextmanager
def explaining(model: nn.Module | None = None, title: str = "") -> Iterator[Report]:
    """Yield a report on the block, filled when it ends; see `explain`."""
    report = Report(title=title)
    stream = OpStream(model, kept := _Kept())
    try:
        with stream:
            yield report
    finally:
        stream.close()  # an interrupt may have come before
        report._fill(kept.finished(), *stream.region)


@overload
def explain(
    fn: None = None, *, model: nn.Module | None = None
) -> AbstractContextManager[Report]: ...


@overload
def explain(
    fn: Callable[..., object],
    *args: object,
    dtype: torch.dtype | str | None = None,
    policy: PolicyLike | None = None,
    model: nn.Module | None = None,
    **kwargs: object,
) -> Report: ...


def explain(
    fn: Callable[..., object] | None = None,
    *args: object,
    dtype: torch.dtype | str | None = None,
    policy: PolicyLike | None = None,
    model: nn.Module | None = None,
    **kwargs: Any,
) -> Report | AbstractContextManager[Report]:
    """Report which op runs in which dtype, and why: a row for each op call site.

        report = explain(model, x, dtype=torch.bfloat16)
        with explain() as report:                 # any code: forward, backward, a step
            loss_fn(model(x), y).backward()

    The program runs once, and its results are the same as without a report. Ops are seen below
    autograd: the report has what ran, casts and backward included. Functions that torch.compile
    compiled run as they are written.

    Args:
        fn: a module or a function; None for a context manager.
        args: of the call; modules and tensors among them in any nesting.
        dtype: the low dtype of a region that is opened around the call, bfloat16 or float16, as a
            name, an alias such as "bf16", or a dtype; None to open none, unless a policy is given.
        policy: of that region, and of the modules among `fn`, its arguments and what it names, in
            place of the policy that `scoped` gave them; it may have rules by module path. None for
            torch's own table of the device, and for the scopes that the modules have.
        model: its modules are called by their paths; by default `fn` itself if it is a module.
        kwargs: of the call.

    Returns:
        The report; without `fn` a context manager that yields it, and fills it when the block ends.

    Raises:
        TypeError: `fn` is not callable, `model` no module, or `dtype` no dtype.
        ValueError: `dtype` is another dtype.
        Exception: any that the call raises.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"explain(model=...) needs a torch.nn.Module, got {brief(model)}.")
    if fn is None:
        if args or kwargs or (dtype, policy) != (None, None):
            raise TypeError(
                "explain() without a function is a context manager: open the region inside it. "
                f"Got args={args!r}, dtype={dtype!r}, policy={policy!r}, {kwargs!r}."
            )
        return explaining(model)
    if not callable(fn):
        raise TypeError(
            f"explain(fn, *args) needs a module or a function, got {brief(fn)}. Give the "
            "function and its arguments, not what it returned."
        )
    if isinstance(fn, nn.Module) and not args and not kwargs:
        raise TypeError(
            f"explain({type(fn).__name__}) calls the module, and has no arguments for it. For a "
            "block, write `with explain(model=...) as report:`."
        )
    title = type(fn).__name__ if isinstance(fn, nn.Module) else getattr(fn, "__name__", str(fn))
    with (stack := ExitStack()), stack:  # an interrupt may come where one of the two is left
        if model is None and isinstance(fn, nn.Module):
            model = fn
        if dtype is not None or policy is not None:
            low = None if dtype is None else dtype_names.of(dtype, "explain(): dtype", LOW)
            open_region((fn, args, kwargs), low, policy, stack)
        report: Report = stack.enter_context(explaining(model, title))
        fn(*args, **kwargs)
    return report


def open_region(
    call: tuple[Any, Any, Any],
    low: torch.dtype | None,
    policy: PolicyLike | None,
    stack: ExitStack,
) -> str:
    """Open a region around a call, with the policy's rules by path; return its device type."""
    fn, args, kwargs = call
    models = training_objects(fn, [args, kwargs]).models
    if policy is not None:
        policy = loaded = policy_files.load(policy)
        if models or not loaded.scopes:  # else a region refuses it, and names `scoped`
            stack.enter_context(scoped_anew(models, loaded))
            policy = loaded.at("") if loaded.scopes else loaded
    given = [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    device = device_of([*given, *(p for model in models for p in model.parameters())])
    stack.enter_context(autocast(device, low, policy=policy))
    return device
