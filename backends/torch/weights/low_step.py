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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from polymp.backends.torch.compat import dtensor, optimizers
from polymp.backends.torch.weights import low_parameters, low_pieces
from polymp.backends.torch.weights.low_parameters import OURS, STEPS, LowWeights
from polymp.backends.torch.weights.low_pieces import Piece

# Bytes of float32 parameters that are lent at a time, unless one parameter alone has more.
LENT = 2**27

Closure = Callable[[], Any]


class Loan:
    """Float32 parameters in the place of low ones, in the groups and the state of an optimizer.

    Args:
        optimizer: whose parameters they are.
        weights: how they are kept low.
        pieces: the low parameters to lend for.
        alone: parameters that stay in the groups as they are; all others are taken out meanwhile.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        weights: LowWeights,
        pieces: list[Piece],
        alone: list[torch.Tensor],
    ) -> None:
        self.optimizer = optimizer
        self.weights = weights
        self.pieces = pieces
        self.lent: dict[torch.Tensor, torch.Tensor] = {}  # by low parameter
        self._lists = [(g["params"], list(g["params"])) for g in optimizer.param_groups]
        self._aside: dict[torch.Tensor, dict[str, Any]] = {}
        self._alone = {id(p) for p in alone}
        for piece in pieces:
            for p, full in low_pieces.values(piece):
                lent = torch.nn.Parameter(full, requires_grad=p.requires_grad)
                self.lent[p] = lent

    def give(self) -> None:
        """Put the float32 parameters in the place of the low ones, with float32 gradients."""
        state = self.optimizer.state
        for p, lent in self.lent.items():
            lent.grad = None if p.grad is None else p.grad.to(torch.float32)
            state[lent] = own = state.pop(p)  # the same dict: some optimizers hold on to it
            self._aside[p] = {key: own.pop(key) for key in OURS if key in own}
        for params, before in self._lists:
            params[:] = [
                self.lent.get(p, p) for p in before if p in self.lent or id(p) in self._alone
            ]

    def take_back(self) -> None:
        """Put the low parameters back in their places."""
        state = self.optimizer.state
        for params, before in self._lists:
            params[:] = before
        for p, lent in self.lent.items():
            state[p] = own = state.pop(lent, {})
            own.update(self._aside.pop(p))

    def write(self) -> None:
        """Store the float32 parameters in the low ones."""
        for piece in self.pieces:
            low_pieces.write(self.weights, self.optimizer.state, piece)


def step(
    optimizer: torch.optim.Optimizer,
    weights: LowWeights,
    kind: type[torch.optim.Optimizer],
    closure: Closure | None,
) -> Any:
    """Take one step of an optimizer on low weights."""
    loss = None
    together = not is_piecewise(kind)
    run = optimizers.step_without_hooks(kind)
    if closure is not None and not together:
        with torch.enable_grad():
            loss = closure()
    refuse_sparse(optimizer)
    low_parameters.complete(weights, optimizer)
    for params, alone in pieces(optimizer, weights, together):
        read = [low_pieces.read(weights, optimizer.state, each) for each in params]
        loan = Loan(optimizer, weights, read, alone)
        with _lent(loan):
            if closure is not None and together:
                result = run(optimizer, _outside(loan, closure))
            else:
                result = run(optimizer)
        loan.write()
        count(optimizer, list(loan.lent))
        weights.stepped.update((p, True) for p in (*loan.lent, *alone) if p.grad is not None)
    return loss if closure is not None and not together else result


@contextmanager
def _lent(loan: Loan) -> Iterator[None]:
    loan.give()
    try:
        yield
    except BaseException:
        loan.take_back()
        raise
    loan.take_back()


def _outside(loan: Loan, closure: Closure) -> Closure:
    """Return a closure that runs on the low parameters, which have the values lent so far."""

    def evaluate() -> Any:
        loan.take_back()
        with torch.no_grad():
            loan.write()
        try:
            return closure()
        finally:
            loan.give()

    return evaluate


def is_piecewise(kind: type) -> bool:
    """Return whether an optimizer's step treats every parameter alone, as torch.optim's do."""
    own: Any = inspect.unwrap(kind.step)  # type: ignore[attr-defined]
    return own.__module__.startswith("torch.optim.") and not issubclass(kind, torch.optim.LBFGS)


def pieces(
    optimizer: torch.optim.Optimizer, weights: LowWeights, together: bool
) -> Iterator[tuple[list[list[torch.Tensor]], list[torch.Tensor]]]:
    """Yield what to lend at a time: low parameters by device, and others that step with them."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    low = [p for p in every if p in weights.places and (together or p.grad is not None)]
    others = [p for p in every if p not in weights.places]
    if together:
        yield [piece for some in _alike(low) for piece in _read_at_once(some, weights)], others
        return
    if others or not low:
        yield [], others
    for some in _alike(low):
        yield _read_at_once(some, weights), []


def _alike(params: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield parameters on one device, of `LENT` bytes at most in float32."""
    some: list[torch.Tensor] = []
    size = 0
    for p in params:
        more = 4 * dtensor.local(p).numel()
        if some and (size + more > LENT or p.device != some[0].device):
            yield some
            some, size = [], 0
        some.append(p)
        size += more
    if some:
        yield some


def _read_at_once(params: list[torch.Tensor], weights: LowWeights) -> list[list[torch.Tensor]]:
    """Return which parameters are read into one row; float32 copies stay where they are."""
    return [[p] for p in params] if weights.mode.name == "master" else [params]


def count(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
    """Count a step of parameters whose rounding is random, unless a fused optimizer skipped it."""
    found = getattr(optimizer, "found_inf", None)
    for p in params:
        steps = optimizer.state[p].get(STEPS)
        if steps is not None and p.grad is not None:
            taken = 1 if found is None else (found == 0).to(steps)
            steps += taken


def refuse_sparse(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a gradient is sparse."""
    for at, group in enumerate(optimizer.param_groups):
        for number, p in enumerate(group["params"]):
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"low_weights(): the gradient of parameter {number} of group {at}, of shape "
                    f"{tuple(p.shape)}, is sparse. The step would have to store the whole weight "
                    "again, and rows without a gradient would not stay as they are. Make the "
                    "embedding with sparse=False, or give its weight an optimizer of its own."
                )
