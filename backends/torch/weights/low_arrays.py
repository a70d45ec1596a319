"""Low weights as torch tensors: the verbs of the core's rules, and runs of them in small pieces.

The rules read and write a tensor a dozen times. In pieces that fit into a processor's cache, or of
a bounded size on a GPU, the memory between the readings stays small.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from polymp.backends.torch.autocast.dtype_names import DTYPES
from polymp.backends.torch.compat import dtensor
from polymp.weights import random_bits, store
from polymp.weights.modes import Mode
from polymp.weights.verbs import Verbs

VERBS: Verbs = Verbs(
    bits=lambda x: x.view(torch.int32),
    float32=lambda x: x.view(torch.float32),
    bits16=lambda x: x.view(torch.int16),
    bfloat16=lambda x: x.view(torch.bfloat16),
    to_int32=lambda x: x.to(torch.int32),
    to_int16=lambda x: x.to(torch.int16),
    wide=lambda x: x.to(torch.float32),
    narrow=lambda x, name: x.to(DTYPES[name]),
    from_half=lambda x: x.to(torch.float32),
    where=torch.where,
)

# Elements of a piece, by device type: 2**16 of float32 with what is made of them fit into the
# second cache of a processor.
_PIECE = {"cpu": 2**16}
_PIECE_ELSEWHERE = 2**24

Random = Callable[[int, int], torch.Tensor]


def flat(t: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a dense tensor as one row, in the order of its memory."""
    t = dtensor.local(t).detach()
    return t.view(-1) if t.is_contiguous() else t.as_strided((t.numel(),), (1,))


def shaped(row: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a row, of `flat`, with the shape and strides of this process's part of a tensor."""
    like = dtensor.local(like)
    return row.as_strided(like.size(), like.stride(), row.storage_offset())


def load(mode: Mode, dtype: str, low: torch.Tensor, beside: torch.Tensor | None) -> torch.Tensor:
    """Return low weights as float32; weights that were written by hand as they are."""
    full: Any = beside if mode.name == "master" else torch.empty_like(low, dtype=torch.float32)
    for at in _pieces(low):
        part = None if beside is None else beside[at]
        rest = store.beside_written(VERBS, mode, dtype, low[at], part)
        if part is not None and rest is not part:
            part.copy_(rest)
        if full is not beside:
            full[at] = store.load(VERBS, mode, low[at], rest)
    return full  # type: ignore[no-any-return]


def keep(
    mode: Mode,
    dtype: str,
    full: torch.Tensor,
    low: torch.Tensor,
    beside: torch.Tensor | None,
    random: Random | None = None,
) -> None:
    """Store float32 weights in low ones and in what stands beside them."""
    for at in _pieces(low):
        if random is None:
            made, rest = store.first(VERBS, mode, dtype, full[at])
        else:
            bits = random(at.start, at.stop)
            made, rest = store.store(VERBS, mode, dtype, full[at], bits)
        low[at] = made
        if beside is not None and beside is not full:
            beside[at] = rest


def random_of(p: torch.Tensor, key: tuple[Any, Any]) -> Random:
    """Return the function that gives the random bits of a parameter, in the order of its memory."""
    part, whole, offset = dtensor.local(p), p.size(), dtensor.offset(p)
    device = part.device
    rows = tuple(part.size()[1:]) == tuple(whole[1:])
    if part.is_contiguous() and rows:
        first = offset[0] * (part[0].numel() if part.numel() else 0) if offset else 0
        return lambda start, stop: random_bits.random16(
            key, _places(first + start, first + stop, device)
        )
    index = torch.zeros((), dtype=torch.int64, device=device)
    step = 1
    for at in range(len(whole) - 1, -1, -1):
        along = torch.arange(offset[at], offset[at] + part.size(at), device=device) * step
        index = index + along.view(-1, *([1] * (len(whole) - 1 - at)))
        step *= whole[at]
    ordered = torch.empty_like(part, dtype=torch.int32)
    ordered.copy_(_wrapped(index))
    row = flat(ordered)
    return lambda start, stop: random_bits.random16(key, row[start:stop])


def _places(start: int, stop: int, device: torch.device) -> torch.Tensor:
    if stop < 2**31:
        return torch.arange(start, stop, dtype=torch.int32, device=device)
    return _wrapped(torch.arange(start, stop, dtype=torch.int64, device=device))


def _wrapped(index: torch.Tensor) -> torch.Tensor:
    return (((index + 2**31) & 0xFFFFFFFF) - 2**31).to(torch.int32)


def _pieces(row: torch.Tensor) -> Iterator[slice]:
    size, n = _PIECE.get(row.device.type, _PIECE_ELSEWHERE), row.numel()
    if torch.compiler.is_compiling():
        size = max(n, 1)  # the compiler keeps nothing in between
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))
