"""The verbs of low weights inside a compiled graph, where 16-bit numbers are kept in 32 bits.

Inductor makes no vector code for a CPU kernel in which an int16 number occurs, and such a kernel
takes ten times as long. So in the graph a bfloat16 number is the float32 number of the same value,
and an int16 number the int32 number. Rounding is done on the bits: inductor would remove a cast to
bfloat16 and back. Remainders, which are int16 in memory, go through ops that it does not look into.
"""

from typing import Any

import torch

from polymp.weights import store
from polymp.weights.modes import Mode
from polymp.weights.verbs import Verbs

_NAN, _UPPER = 0x7F800000, -0x10000


def _narrow(full: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round float32 to the nearest bfloat16 number, ties to even, as float32."""
    assert dtype == "bfloat16"
    bits = full.view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & _UPPER
    is_nan = (bits & 0x7FFFFFFF) > _NAN
    return torch.where(is_nan, bits, rounded).view(torch.float32)


_VERBS: Verbs = Verbs(
    bits=lambda x: x.view(torch.int32),
    float32=lambda x: x.view(torch.float32),
    bits16=lambda x: x.view(torch.int32) >> 16,
    bfloat16=lambda x: (x << 16).view(torch.float32),
    to_int32=lambda x: x,
    to_int16=lambda x: x,  # all that the rules store is in the range of int16
    narrow=_narrow,
    from_half=lambda x: x.to(torch.float32),
    where=torch.where,
)


def verbs(mode: Mode) -> Verbs:
    """Return the verbs of a mode.

    Beside a float32 copy nothing reads the rounded weight again, so the compiler's own cast to
    bfloat16 is safe there, and it is the shortest way.
    """
    if mode.name == "master":
        return _VERBS._replace(narrow=lambda x, dtype: x.to(torch.bfloat16))
    return _VERBS


def load(mode: Mode, low: torch.Tensor, rest: Any) -> torch.Tensor:
    """Return low weights as float32; those written by hand as they are.

    It is `store.beside_written` and `store.load` in fewer operations: what does not fit to a weight
    is known by its size. A weight that was written through `data`, and is nearer than a last place
    to the one before, counts as the one before.

    Args:
        mode: the mode.
        low: the weights.
        rest: what stands beside them.

    Returns:
        Of the same shape.
    """
    if mode.name == "split":
        full = store.load(_VERBS, mode, low, rest)
        return torch.where(full.isnan(), low, full)
    place = low.abs() * 2.0**-8 + 2.0**-133  # at least half of the last place
    if mode.name == "master":
        return torch.where((rest - low).abs() <= place, rest, low)
    if mode.name == "kahan":
        return torch.where(rest.abs() <= place, low + rest, low)
    return low


def opened(beside: torch.Tensor | None) -> Any:
    """Return what stands beside a weight as the verbs take it."""
    if beside is None or beside.dtype is torch.float32:
        return beside
    if beside.dtype is torch.int16:
        if beside.device.type == "cpu":
            return torch.ops.polymp.int16_to_int32(beside)
        return beside.to(torch.int32)
    return beside.to(torch.float32)


def put(beside: torch.Tensor, rest: torch.Tensor) -> None:
    """Write what the verbs have made of it."""
    if beside.dtype is torch.int16 and beside.device.type == "cpu":
        torch.ops.polymp.put_int32_in_int16(beside, rest)
    else:
        beside.copy_(rest)


def _put(into: torch.Tensor, x: torch.Tensor) -> None:
    into.copy_(x)


_library = torch.library.Library("polymp", "FRAGMENT")
_library.define("int16_to_int32(Tensor x) -> Tensor")
_library.define("put_int32_in_int16(Tensor(a!) into, Tensor x) -> ()")
_library.impl("int16_to_int32", lambda x: x.to(torch.int32), "CPU")
_library.impl("int16_to_int32", lambda x: x.to(torch.int32), "Meta")
_library.impl("put_int32_in_int16", _put, "CPU")
_library.impl("put_int32_in_int16", lambda into, x: None, "Meta")
