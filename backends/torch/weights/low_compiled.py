"""A step on low weights inside code that torch.compile compiles: one graph for all of it.

Dynamo has a handler of its own for optimizers, which takes parameters from the optimizer's groups
alone. So the step that is traced is that of a twin: an object with the methods of the optimizer's
class that is no optimizer for dynamo, whose parameters are float32 values inside the graph. The
compiler then reads the low weights, computes, and stores, in one kernel for each parameter, and no
float32 weight is ever in memory.

The graph of the caller breaks here, as it does at every optimizer of torch's.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from polymp.backends.torch.compat import dtensor, dynamo, inductor, optimizers
from polymp.backends.torch.weights import low_parameters, low_step, low_traced
from polymp.backends.torch.weights.low_parameters import BESIDE, OURS, STEPS, LowWeights
from polymp.weights import random_bits

Step = Callable[..., None]


@dynamo.untraced("the step of low_weights compiles a graph of its own")
def step(
    optimizer: torch.optim.Optimizer,
    weights: LowWeights,
    kind: type[torch.optim.Optimizer],
    compiled: dict[str, Step],
    closure: low_step.Closure | None,
) -> Any:
    """Take one step of an optimizer on low weights, compiled where that is possible.

    The first step of a parameter, which makes its state, runs as it is written; so do the steps of
    fused optimizers, which are one kernel already, of sharded parameters, of float16 weights, and
    of optimizers that are not of torch.optim.
    """
    with torch.no_grad():
        if not _can_compile(optimizer, weights, kind):
            return low_step.step(optimizer, weights, kind, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_grad = [
            [p for p in group["params"] if p.grad is not None] for group in optimizer.param_groups
        ]
        every = [p for group in with_grad for p in group]
        if any(not weights.stepped.get(p) for p in every):
            low_step.step(optimizer, weights, kind, None)
            return loss
        low_step.refuse_sparse(optimizer)
        low_parameters.complete(weights, optimizer)
        for p in every:
            if p in weights.places:
                low_parameters.prepare(weights, optimizer.state, p)
        if "step" not in compiled:
            compiled["step"] = torch.compile(_step_of(kind, weights), options=inductor.OPTIONS)
        _run(optimizer, weights, with_grad, compiled["step"])
    return loss


def _can_compile(
    optimizer: torch.optim.Optimizer, weights: LowWeights, kind: type[torch.optim.Optimizer]
) -> bool:
    groups = optimizer.param_groups
    return (
        low_step.is_piecewise(kind)
        and weights.dtype == "bfloat16"
        and not any(group.get("fused") for group in groups)
        and all(dtensor.local(p) is p for group in groups for p in group["params"])
    )


def _run(
    optimizer: torch.optim.Optimizer,
    weights: LowWeights,
    with_grad: list[list[torch.Tensor]],
    step: Step,
) -> None:
    state: Any = optimizer.state
    every = [p for group in with_grad for p in group]
    own = [{k: v for k, v in state[p].items() if k not in OURS} for p in every]
    settings = []
    for group in optimizer.param_groups:
        settings.append({k: v for k, v in group.items() if k not in ("params", "param_names")})
        if "capturable" in group:
            settings[-1]["capturable"] = True  # as dynamo does: nothing may wait in a graph
    step(
        [p.detach() for p in every],
        [p.grad for p in every],
        own,
        [low_traced.viewed(state[p].get(BESIDE)) if p in weights.places else None for p in every],
        [state[p].get(STEPS) if p in weights.places else None for p in every],
        [weights.places.get(p) for p in every],
        [len(group) for group in with_grad],
        settings,
    )
    for p, entries in zip(every, own, strict=True):
        state[p].update(entries)
        if p in weights.places:
            low_parameters.note_versions(weights, state, p)


def _step_of(kind: Any, weights: LowWeights) -> Step:
    """Return the function to compile for optimizers of a class."""
    mode, seed = weights.mode, weights.seed
    twin_class, own_step = _twin_class(kind), optimizers.plain_step(kind)

    def step(
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        states: list[dict[str, Any]],
        besides: list[torch.Tensor | None],
        steps: list[torch.Tensor | None],
        places: list[int | None],
        sizes: list[int],
        settings: list[dict[str, Any]],
    ) -> None:
        fulls = []
        for p, grad, beside, place in zip(params, grads, besides, places, strict=True):
            full = p
            if place is not None:
                full = low_traced.load(mode, p.to(torch.float32), low_traced.opened(beside))
            full.grad = grad.to(torch.float32) if place is not None else grad
            fulls.append(full)
        twin = twin_class.__new__(twin_class)
        twin.param_groups = []
        first = 0
        for size, setting in zip(sizes, settings, strict=True):
            twin.param_groups.append({**setting, "params": fulls[first : first + size]})
            first += size
        twin.state = dict(zip(fulls, states, strict=True))
        twin.defaults = settings[0]
        own_step(twin)
        for p, full, beside, count, place in zip(
            params, fulls, besides, steps, places, strict=True
        ):
            if place is None:
                continue
            random = None
            if count is not None:
                index = torch.arange(p.numel(), dtype=torch.int32, device=p.device).view(p.shape)
                random = random_bits.random16(random_bits.key(seed, count, place), index)
            low, rest = low_traced.keep(mode, full, random)
            p.copy_(low)
            if beside is not None:
                low_traced.put(beside, rest)
            if count is not None:
                count += 1

    return step


@cache
def _twin_class(kind: Any) -> Any:
    """Return a class with an optimizer's methods that dynamo takes for no optimizer."""
    methods = {
        name: optimizers.traceable(value)
        for each in reversed(kind.__mro__[:-1])
        for name, value in vars(each).items()
        if name not in ("__dict__", "__weakref__", "__init__", "__doc__", "__module__")
    }
    return type(f"{kind.__name__}Twin", (), methods)
