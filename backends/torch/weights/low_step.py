"""A step of any optimizer on low weights: it is lent float32 parameters for as long as it runs.

    read      float32 parameters are made of the low ones, float32 gradients of theirs
    lend      they stand in the optimizer's groups, and are the keys of its state
    step      the optimizer's own step, as it is written
    write     the low parameters and what stands beside them are made of the new values

An optimizer of torch.optim treats every parameter alone. For it this happens in pieces of bounded
size, so that no second float32 model is ever alive. Any other optimizer may look at all parameters
at once (LBFGS, and who knows what users write), so it is lent all of them together.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from polymp import weights
from polymp.backends.torch.compat import distributed, dynamo, inductor, optimizers
from polymp.backends.torch.weights import low_parameters
from polymp.backends.torch.weights.low_parameters import OURS, STEPS, LowWeights, Param
from polymp.weights import Mode, Verbs, key, random16

# Bytes of float32 parameters that are lent at a time, unless one parameter alone has more.
LENT = 2**27
Closure = Callable[[], Any]


class Loan:
    """Float32 tensors in the place of low parameters, in an optimizer's groups and its state."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lent: dict[Param, torch.Tensor],
        others: list[Param],
    ) -> None:
        self.optimizer = optimizer
        self.lent = lent  # by low parameter
        self._in_groups = {p: p for p in others} | lent  # the others stay in them as they are
        self._lists = [(g["params"], list(g["params"])) for g in optimizer.param_groups]
        # What stands beside the low parameters, which is not in the state meanwhile.
        self._aside: dict[Param, dict[str, Any]] = {}

    def give(self) -> None:
        """Put the float32 tensors in the places of the low parameters."""
        state: Any = self.optimizer.state
        for p, lent in self.lent.items():
            if p in state:
                state[lent] = own = state.pop(p)  # the same dict: some optimizers hold on to it
                self._aside[p] = {key: own.pop(key) for key in OURS if key in own}
        for params, before in self._lists:
            params[:] = [self._in_groups[p] for p in before if p in self._in_groups]

    def take_back(self) -> None:
        """Put the low parameters back in their places."""
        state: Any = self.optimizer.state
        for group, (params, before) in zip(self.optimizer.param_groups, self._lists, strict=False):
            params[:] = before
            group["params"] = params  # of a group that was loaded meanwhile, too
        for p, lent in self.lent.items():
            if lent in state or p in self._aside:
                state[p] = own = state.pop(lent, {})
                own.update(self._aside.pop(p, {}))


def take_step(optimizer: Any, closure: Closure | None, compiled: bool = False) -> Any:
    """Take one step of an optimizer on low weights, compiled if wanted and possible."""
    low: LowWeights = optimizer._low
    loss = None
    together = not is_piecewise(optimizer._kind)
    if closure is not None and not together:
        with torch.enable_grad():
            loss = closure()
    refuse_sparse(optimizer)
    low.complete(optimizer)
    if compiled and _can_compile(optimizer):
        _run(optimizer)
        return loss
    every = optimizers.parameters(optimizer)
    others = [p for p in every if p not in low.places]
    rows = list(_alike(p for p in every if p in low.places and (together or p.grad is not None)))
    if together:
        return _step_on(optimizer, rows, others, closure)
    if others or not rows:
        _step_on(optimizer, [], others)
    for row in rows:
        _step_on(optimizer, [row], [])
    return loss


def _step_on(
    optimizer: Any, rows: list[list[Param]], others: list[Param], closure: Closure | None = None
) -> Any:
    """Take the step on some low parameters, and on others that step with them."""
    low, state = optimizer._low, optimizer.state
    run = optimizers.step_without_hooks(optimizer._kind)
    read = [piece for row in rows for piece in low.read(state, row)]
    lent: dict[Param, torch.Tensor] = {
        p: torch.nn.Parameter(full, requires_grad=p.requires_grad)
        for piece in read
        for p, full in piece.values()
    }
    loan = Loan(optimizer, lent, others)

    def give() -> None:
        for p, full in lent.items():
            full.grad = None if p.grad is None else p.grad.to(torch.float32)
        loan.give()

    def write() -> None:
        for piece in read:
            low.write(state, piece)

    def evaluate() -> Any:  # on the low parameters, which have the values lent so far
        assert closure is not None
        loan.take_back()
        with torch.no_grad():
            write()
        try:
            return closure()
        finally:
            give()

    give()
    try:
        result = run(optimizer) if closure is None else run(optimizer, evaluate)
    finally:
        loan.take_back()
    write()
    found = getattr(optimizer, "found_inf", None)  # of a fused optimizer, which may have skipped
    for p in lent:
        steps = state[p].get(STEPS)
        if steps is not None and p.grad is not None:
            steps += 1 if found is None else (found == 0).to(steps)
    low.stepped.update(p for p in (*lent, *others) if p.grad is not None)
    return result


def is_piecewise(kind: type) -> bool:
    """Return whether an optimizer's step treats every parameter alone, as torch.optim's do."""
    own: Any = inspect.unwrap(kind.step)  # type: ignore[attr-defined]
    return own.__module__.startswith("torch.optim.") and not issubclass(kind, torch.optim.LBFGS)


def _alike(params: Iterable[Param]) -> Iterator[list[Param]]:
    """Yield parameters on one device, of `LENT` bytes at most in float32."""
    some: list[Param] = []
    size = 0
    for p in params:
        more = 4 * distributed.local(p).numel()
        if some and (size + more > LENT or p.device != some[0].device):
            yield some
            some, size = [], 0
        some.append(p)
        size += more
    if some:
        yield some


def refuse_sparse(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a gradient is sparse."""
    for p in optimizers.parameters(optimizer):
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise RuntimeError(
                f"low_weights(): the gradient of {optimizers.names(optimizer)[p]}, of shape "
                f"{tuple(p.shape)}, is sparse. The step would have to store the whole weight "
                "again, and rows without a gradient would not stay as they are. Make the "
                "embedding with sparse=False, or give its weight an optimizer of its own."
            )


# A step on low weights inside code that torch.compile compiles: one graph for all of it.
#
# Dynamo has a handler of its own for optimizers, which takes parameters from the optimizer's
# groups alone. So the step that is traced is that of a twin: an object with the methods of the
# optimizer's class that is no optimizer for dynamo, whose parameters are float32 values inside
# the graph. The compiler then reads the low weights, computes, and stores, in one kernel for
# each parameter, and no float32 weight is ever in memory.
#
# The graph of the caller breaks here, as it does at every optimizer of torch's.


@dynamo.untraced("the step of low_weights compiles a graph of its own")
def take_compiled_step(optimizer: Any, closure: Closure | None) -> Any:
    """Take one step of an optimizer on low weights, compiled where that is possible."""
    with torch.no_grad():
        return take_step(optimizer, closure, compiled=True)


def _can_compile(optimizer: Any) -> bool:
    # As they are written run the first step of a parameter, which makes its state, and the steps of
    # fused optimizers, which are one kernel already, of sharded parameters, and of optimizers that
    # are not of torch.optim.
    every = optimizers.parameters(optimizer)
    return (
        is_piecewise(optimizer._kind)
        and not any(group.get("fused") for group in optimizer.param_groups)
        and all(distributed.local(p) is p for p in every)
        and optimizer._low.stepped.issuperset(p for p in every if p.grad is not None)
    )


class InGraph(NamedTuple):
    """A parameter as a compiled step gets it."""

    param: torch.Tensor
    grad: torch.Tensor
    state: dict[str, Any]  # of the optimizer's own
    beside: torch.Tensor | None  # int16 as bfloat16 of the same bits; written
    was: torch.Tensor | None  # the same before the step, and read
    steps: torch.Tensor | None
    # None for one that is kept. A text, for of an int that changes dynamo makes a symbol, and of
    # what is computed with it inductor makes a kernel that gcc does not take.
    place: str | None


def _run(optimizer: Any) -> None:
    low, state = optimizer._low, optimizer.state
    groups: list[tuple[dict[str, Any], list[InGraph]]] = []
    own: dict[Param, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        if "capturable" in group:
            settings["capturable"] = True  # as dynamo does: nothing may wait in a graph
        groups.append((settings, []))
        for p in group["params"]:
            if p.grad is None:
                continue
            own[p] = {k: v for k, v in state[p].items() if k not in OURS}
            beside = was = steps = None
            if p in low.places:
                beside = low_parameters.as_saved(low.beside(state, p))
                # Inductor may put a kernel that reads it behind the op that writes it.
                was = beside.clone() if low.mode.name == "split" else beside
                steps = state[p].get(STEPS)
            place = str(low.places[p]) if p in low.places else None
            groups[-1][1].append(InGraph(p.detach(), p.grad, own[p], beside, was, steps, place))
    if low.compiled is None:
        step = _step_of(low, _twin_class(optimizer._kind))
        low.compiled = torch.compile(step, options=inductor.OPTIONS)
    low.compiled(groups)
    for p, entries in own.items():
        state[p].update(entries)


def _step_of(own: LowWeights, twin_class: Any) -> Callable[..., None]:
    """Return the function to compile."""
    mode, seed = own.mode, own.seed

    def graph_step(groups: list[tuple[dict[str, Any], list[InGraph]]]) -> None:
        twin = twin_class.__new__(twin_class)
        twin.param_groups, twin.state, twin.defaults = [], {}, groups[0][0]
        low = []
        for settings, params in groups:
            fulls = []
            for each in params:
                full, grad = each.param, each.grad
                if each.place is not None:
                    full = load(mode, full.to(torch.float32), opened(each.was))
                    grad = grad.to(torch.float32)
                    low.append((each.place, each, full))
                full.grad = grad
                twin.state[full] = each.state
                fulls.append(full)
            twin.param_groups.append({**settings, "params": fulls})
        twin.step()
        for place, each, full in low:
            p, random = each.param, None
            if each.steps is not None:
                index = torch.arange(p.numel(), dtype=torch.int32, device=p.device).view(p.shape)
                random = random16(key(seed, each.steps, int(place)), index)
            new, rest = keep(mode, full, random)
            p.copy_(new)
            if each.beside is not None:
                put(each.beside, rest)
            if each.steps is not None:
                each.steps.add_(1)

    return graph_step


@cache
def _twin_class(kind: Any) -> Any:
    """Return a class with an optimizer's methods that dynamo takes for no optimizer."""
    # Torch's wrappers around `step` run hooks and break graphs; dynamo's around `_init_group` has a
    # mark that it is not to be traced.
    methods = {
        name: inspect.unwrap(value) if inspect.isfunction(value) else value
        for each in reversed(kind.__mro__[:-1])
        for name, value in vars(each).items()
        if name not in ("__dict__", "__weakref__", "__init__", "__doc__", "__module__")
    }
    return type(f"{kind.__name__}Twin", (), methods)


# The verbs of low weights inside a compiled graph, where 16-bit numbers are kept in 32 bits.
#
# Inductor makes no vector code for a CPU kernel in which an int16 number occurs, and such a
# kernel takes ten times as long. So in the graph a bfloat16 number is the float32 number of the
# same value, and an int16 number the int32 number. `keep` rounds on the bits: inductor would
# remove a cast to bfloat16 and back. Remainders, which are int16 in memory, are read as bfloat16
# numbers of the same bits. They are written by an op that inductor does not look into: a cast to
# bfloat16 would change those that are the bits of a NaN.


VERBS: Verbs = low_parameters.VERBS._replace(
    bfloat16=lambda x: (x << 16).view(torch.float32),
    to_int16=lambda x: x,  # what is stored in int16 is cut off there
)


def keep(mode: Mode, full: torch.Tensor, random: Any) -> tuple[torch.Tensor, Any]:
    """Return float32 weights as they are stored: the low weights, and what stands beside them."""
    # Where the low weight is the usual cast, the compiler makes it, of NaN too.
    if mode.name == "master":
        return full, full
    return weights.store(VERBS, mode, full, random)


def load(mode: Mode, low: torch.Tensor, rest: Any) -> torch.Tensor:
    """Return low weights as float32; those written by hand as they are."""
    # As `weights.beside_written` and `weights.load` in fewer operations: what does not fit to a
    # weight is known by its size. A weight that was written through `data`, and is nearer than a
    # last place to the one before, counts as the one before.
    if mode.name == "split":
        full = (low.view(torch.int32) + rest).view(torch.float32)  # NaN with any payload
        return torch.where(full == full, full, low)
    # Half of the last place of a weight is at most its 2**-8th part.
    if mode.name == "master":
        place = low.abs() * 2.0**-8 + 2.0**-126
        return torch.where((rest - low).abs() <= place, rest, low)
    return low


def opened(beside: torch.Tensor | None) -> Any:
    """Return what stands beside a weight, from `as_saved`, as the verbs take it."""
    if beside is None or beside.dtype is torch.float32:
        return beside
    return beside.to(torch.float32).view(torch.int32) >> 16


def put(beside: torch.Tensor, rest: torch.Tensor) -> None:
    """Write what the verbs have made of it."""
    if rest.dtype is torch.int32:
        torch.ops.polymp.put_bits(beside, rest)
    else:
        beside.copy_(rest)


def _put_bits(into: torch.Tensor, x: torch.Tensor) -> None:
    into.view(torch.int16).copy_(x)


_library = torch.library.Library("polymp", "FRAGMENT")
_library.define("put_bits(Tensor(a!) into, Tensor x) -> ()")
_library.impl("put_bits", _put_bits, "CompositeExplicitAutograd")
_library.impl("put_bits", lambda into, x: None, "Meta")
