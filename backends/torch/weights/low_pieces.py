"""Low parameters on one device, read and stored together as one row of float32 values."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from polymp.backends.torch.compat import dtensor
from polymp.backends.torch.weights import low_arrays, low_parameters
from polymp.backends.torch.weights.low_parameters import BESIDE, STEPS, LowWeights, OptimizerState
from polymp.weights import random_bits


class Piece(NamedTuple):
    """Low parameters on one device, to be read and stored together.

    Attributes:
        params: the parameters.
        low: their values in one row; the memory of the parameter itself if there is one.
        beside: what stands beside them in one row, likewise; None if nothing does.
        full: their float32 values in one row; `beside` itself for `master`.
    """

    params: list[torch.Tensor]
    low: torch.Tensor
    beside: torch.Tensor | None
    full: torch.Tensor


def read(weights: LowWeights, state: OptimizerState, params: list[torch.Tensor]) -> Piece:
    """Read low parameters on one device as float32, together."""
    besides = [low_parameters.prepare(weights, state, p) for p in params]
    low = _row(params)
    beside = None if besides[0] is None else _row(besides)
    full = low_arrays.load(weights.mode, weights.dtype, low, beside)
    for p in params:
        if p in weights.versions:  # what is beside it may have been written
            low_parameters.note_versions(weights, state, p)
    return Piece(params, low, beside, full)


def write(weights: LowWeights, state: OptimizerState, piece: Piece) -> None:
    """Store the float32 values of a piece in its parameters and in what stands beside them."""
    params = piece.params
    if weights.mode.name == "stochastic":
        at = 0
        for p in params:
            until = at + dtensor.local(p).numel()
            random = low_arrays.random_of(p, key_of(weights, state, p))
            low_arrays.keep(
                weights.mode, weights.dtype, piece.full[at:until], piece.low[at:until], None, random
            )
            at = until
    else:
        low_arrays.keep(weights.mode, weights.dtype, piece.full, piece.low, piece.beside)
    if len(params) > 1:
        _put(params, piece.low)
        if piece.beside is not None:
            _put([state[p][BESIDE] for p in params], piece.beside)
    for p in params:  # their memory was written through aliases, which have the same version
        low_parameters.note_versions(weights, state, p)


def key_of(weights: LowWeights, state: OptimizerState, p: torch.Tensor) -> Any:
    """Return the key of the random bits of a parameter's next step."""
    steps = state[p][STEPS]
    taken = steps if steps.device.type != "cpu" or torch.compiler.is_compiling() else int(steps)
    return random_bits.key(weights.seed, taken, weights.places[p])


def values(piece: Piece) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parameters of a piece, and the float32 values of each, with its shape."""
    at = 0
    for p in piece.params:
        until = at + dtensor.local(p).numel()
        yield p, dtensor.like(low_arrays.shaped(piece.full[at:until], p), p)
        at = until


def _row(tensors: list[Any]) -> torch.Tensor:
    rows = [low_arrays.flat(t) for t in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _put(tensors: list[torch.Tensor], row: torch.Tensor) -> None:
    """Write the parts of a row to tensors, in one call."""
    rows = [low_arrays.flat(t) for t in tensors]
    torch._foreach_copy_(rows, list(row.split([r.numel() for r in rows])))
