"""The numbers that a record has of a tensor, computed where the tensor is and read later.

    found = sums(t)             float64 [SUMS], on the tensor's device, for `values`
    moved = changes(t, probes)  [probes, CHANGES]: how far they are moved, for each probe
    values(...), spread(...)    once the host has read them

Of tensors in the memory of a CPU `run_record.Summaries` has them, in less time. All but the largest
magnitude are relative to it, so that no square leaves the range of its dtype.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from polymp.diagnostics.run_record import (
    AMAX,
    BLOCK,
    ELEMENTS,
    PROJECTIONS,
    RMS,
    VALUES,
    signs_and_ones,
)

SUMS = 22  # top, zeros, bad, norm, sum, projections, elements, sum of magnitudes
CHANGES = 21  # top, two sums with the tensor, norm, sum, projections, elements

_PROJECTIONS = PROJECTIONS.stop - PROJECTIONS.start
_ELEMENTS = ELEMENTS.stop - ELEMENTS.start


def exact(device: torch.device) -> torch.dtype:
    """Return the dtype in which sums are computed on a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def numbers(t: torch.Tensor) -> Any:
    """Return the numbers of a tensor in the memory of a CPU as a numpy array."""
    t = t.detach()
    wide = t if t.dtype in (torch.float32, torch.float64) else t.to(torch.float32)
    return wide.numpy(force=True)


def sums(t: torch.Tensor) -> torch.Tensor:
    """Return what `values` needs of a tensor of floats, integers or bools."""
    x, dtype = t.detach().reshape(-1), exact(t.device)
    if not x.numel():
        return torch.zeros(SUMS, dtype=dtype, device=t.device)
    wide = x.to(dtype, copy=True)
    bad = torch.zeros((), dtype=dtype, device=t.device)
    top = _top(x) if x.is_floating_point() else _top(wide)
    if _may_be_bad(top):
        bad += len(x) - wide.isfinite().count_nonzero()
        top = _top(wide.nan_to_num_(0.0, 0.0, 0.0))
    top = top.to(dtype)
    scale = torch.where(top > 0, top, 1.0)
    zeros = len(x) - wide.count_nonzero() - bad
    if x.dtype is dtype:  # its squares may be beyond the range
        wide.div_(scale)
        scale = torch.ones_like(scale)
    norm = torch.linalg.vector_norm(wide)[None]
    found = [norm, _projected(wide[None])[0], wide[_places(wide)], wide.abs_().sum()[None]]
    return torch.cat([torch.stack([top, zeros, bad]), torch.cat(found) / scale])


def _top(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of floats; NaN if there is one."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high)


def _may_be_bad(number: torch.Tensor) -> bool:
    """Return whether a number is not finite; True on devices that the host would wait for."""
    return not number.is_cpu or not math.isfinite(number)


def changes(t: torch.Tensor, probes: torch.Tensor) -> torch.Tensor:
    """Return what `spread` needs of a float tensor; probes are [count, *t.shape]."""
    dtype = torch.float64 if t.dtype is torch.float64 else torch.float32
    x, moved = t.detach().reshape(1, -1).to(dtype), probes.reshape(len(probes), -1).to(dtype)
    if not x.numel():
        return torch.zeros(len(probes), CHANGES, dtype=dtype, device=t.device)
    top = _top(x)
    if _may_be_bad(top):
        top = _top(x.nan_to_num(0.0, 0.0, 0.0))
    scale = torch.where(top > 0, top, 1.0)
    by = (moved - x).div_(scale)
    norms = torch.linalg.vector_norm(by, dim=1)
    if _may_be_bad(norms.sum()):
        x, moved = (torch.nan_to_num(each, 0.0, 0.0, 0.0) for each in (x, moved))
        norms = torch.linalg.vector_norm(by.nan_to_num_(0.0, 0.0, 0.0), dim=1)
    tops = torch.stack([_top(row) for row in moved])
    x = (x / scale)[0]
    ends = torch.stack([tops, by @ x, by @ x.sign(), norms], 1)
    return torch.cat([ends, _projected(by), by[:, _places(x)]], 1)


def _projected(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row, and its projections, not divided yet: [rows, 1 + 8]."""
    rows, count = x.shape
    blocks = count // BLOCK
    outer, inner = _signs(x.device, x.dtype, 1 << (blocks + 1).bit_length())
    end = blocks * BLOCK
    found = (x[:, end:] @ inner[: count - end]) * outer[blocks]
    if blocks:
        whole, signs = x[:, :end].reshape(rows, blocks, BLOCK), outer[:blocks]
        if blocks > 8:  # the product is less narrow
            found += (signs.T @ whole).mul_(inner.T).sum(2)
        else:
            found += (whole @ inner).mul_(signs).sum(1)
    return found


@cache
def _signs(
    device: torch.device, dtype: torch.dtype, blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `run_record.signs` on a device, with a column of ones in front."""
    with torch.inference_mode(False):
        both = signs_and_ones(blocks)
        outer, inner = (torch.from_numpy(each).to(device, dtype).T for each in both)
    return outer, inner


def _places(x: torch.Tensor) -> torch.Tensor:
    """Return the places of the elements that are kept of a row; see `run_record.places`."""
    return torch.arange(_ELEMENTS, device=x.device) * (len(x) - 1) // (_ELEMENTS - 1)


# Once the host has read them.


def values(found: Any, count: int) -> tuple[tuple[float, ...], int, int]:
    """Return the values of an array, how many elements are zero and not finite, from its sums."""
    if not count:
        return (0.0,) * VALUES, 0, 0
    top, zeros, bad, norm, total = found[:5].tolist()
    numbers = [1.0, norm / math.sqrt(count), total / count, found[-1] / count]
    projections = found[5 : 5 + _PROJECTIONS] / math.sqrt(count)
    whole = np.concatenate([numbers, projections, found[5 + _PROJECTIONS : -1]]) * top
    return tuple(whole.tolist()), int(zeros), int(bad)


def spread(whole: Sequence[float], moved: Any, count: int) -> tuple[float, ...]:
    """Return how far the values of an array are moved: the root mean square over probes."""
    if not count:
        return (0.0,) * VALUES
    top, rms = whole[AMAX], whole[RMS] / (whole[AMAX] or 1.0)
    tops, along, signed, norms = moved.T[:4]
    longer = (2 * along + norms**2) / count
    sizes = np.sqrt(np.maximum(rms**2 + longer, 0)) + rms
    ends = (
        (tops - top) / (top or 1.0),
        longer / np.where(sizes > 0, sizes, 1),
        moved[:, 4] / count,
        signed / count,
    )
    projections = moved[:, 5 : 5 + _PROJECTIONS] / math.sqrt(count)
    changed = np.concatenate([np.stack(ends, 1), projections, moved[:, 5 + _PROJECTIONS :]], 1)
    return tuple((np.sqrt((changed**2).mean(0)) * (top or 1.0)).tolist())
