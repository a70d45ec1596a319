"""The verbs of low weights inside a compiled graph, where 16-bit numbers are kept in 32 bits.

Inductor makes no vector code for a CPU kernel in which an int16 number occurs, and such a kernel
takes ten times as long. So in the graph a bfloat16 number is the float32 number of the same value,
and an int16 number the int32 number. Rounding is done on the bits: inductor would remove a cast to
bfloat16 and back. Remainders, which are int16 in memory, are read as bfloat16 numbers of the same
bits. They are written by an op that inductor does not look into: a cast to bfloat16 would change
those that are the bits of a NaN.
"""

from typing import Any

import torch

from polymp.weights import store
from polymp.weights.modes import Mode
from polymp.weights.verbs import Verbs

_UPPER = -0x10000


def _narrow(full: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round float32 to the nearest bfloat16 number, ties to even, as float32; NaN to anything."""
    assert dtype == "bfloat16"
    bits = full.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & _UPPER).view(torch.float32)


VERBS: Verbs = Verbs(
    bits=lambda x: x.view(torch.int32),
    float32=lambda x: x.view(torch.float32),
    bits16=lambda x: x.view(torch.int32) >> 16,
    bfloat16=lambda x: (x << 16).view(torch.float32),
    to_int32=lambda x: x,
    to_int16=lambda x: x,  # what is stored in int16 is cut off there
    wide=lambda x: x,
    narrow=_narrow,
    from_half=lambda x: x.to(torch.float32),
    where=torch.where,
)


def keep(mode: Mode, full: torch.Tensor, random: Any) -> tuple[torch.Tensor, Any]:
    """Return float32 weights as they are stored: the low weights, and what stands beside them.

    Where the low weight is the usual cast, the compiler makes it, of NaN too.
    """
    if mode.name == "master":
        return full, full
    return store.store(VERBS, mode, "bfloat16", full, random)


def load(mode: Mode, low: torch.Tensor, rest: Any) -> torch.Tensor:
    """Return low weights as float32; those written by hand as they are.

    It is `store.beside_written` and `store.load` in fewer operations: what does not fit to a weight
    is known by its size. A weight that was written through `data`, and is nearer than a last place
    to the one before, counts as the one before.
    """
    if mode.name == "split":
        full = (low.view(torch.int32) + rest).view(torch.float32)  # NaN with any payload
        return torch.where(full == full, full, low)
    # Half of the last place of a weight is at most its 2**-8th part.
    if mode.name == "master":
        place = low.abs() * 2.0**-8 + 2.0**-126
        return torch.where((rest - low).abs() <= place, rest, low)
    return low


def viewed(beside: torch.Tensor | None) -> torch.Tensor | None:
    """Return what stands beside a weight for a graph: int16 as bfloat16 of the same bits."""
    if beside is not None and beside.dtype is torch.int16:
        return beside.view(torch.bfloat16)
    return beside


def opened(beside: torch.Tensor | None) -> Any:
    """Return what stands beside a weight, from `viewed`, as the verbs take it."""
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
