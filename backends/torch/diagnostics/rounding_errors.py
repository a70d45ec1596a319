"""The rounding errors of ops, measured beside a run by twins of its tensors in float32.

    an op on the tensors before its casts, in float32     its own error: `rounding`
    an op on twins, each made of twins                    the error of all so far: `drift`

A twin lies in memory as its tensor does, so that it has the same views. Nothing of the run is
written, and nothing is read from the device.
"""

from collections.abc import Sequence
from typing import Any

import torch

from polymp.backends.torch.compat import dispatcher, storage
from polymp.backends.torch.diagnostics.measure import Bins, measurable, sample
from polymp.backends.torch.diagnostics.op_call import Ran
from polymp.backends.torch.diagnostics.op_kinds import float_tensors

_LOW = (torch.float16, torch.bfloat16)
_SWEEP = 512  # tensors after which twins of freed ones are let go


class Twins:
    """Twins of tensors, by the memory that these are on; they are let go with it."""

    def __init__(self) -> None:
        self._flat: dict[int, tuple[Any, int, torch.Tensor]] = {}

    def of(self, t: torch.Tensor) -> torch.Tensor | None:
        """Return the twin of a tensor; None if it has none."""
        _, size, flat = self._flat.get(storage.storage_key(t), (None, 0, None))
        if flat is None or size != t.element_size():
            return None
        return flat.as_strided(t.shape, t.stride(), t.storage_offset())

    def put(self, t: torch.Tensor, wide: torch.Tensor) -> None:
        """Give a tensor a twin, which nothing writes into afterwards."""
        key, size = storage.storage_key(t), t.element_size()
        count = t.untyped_storage().nbytes() // size
        whole = wide.stride() == t.stride() and t.storage_offset() == 0
        if whole and wide.storage_offset() == 0 and wide.untyped_storage().nbytes() == count * 4:
            flat = wide.as_strided((count,), (1,))
        else:
            old = self._flat.get(key, (None, 0, None))[2]
            flat = t.as_strided((count,), (1,), 0).to(torch.float32) if old is None else old
            flat = flat.clone()
            flat.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(wide)
        if len(self._flat) % _SWEEP == 0:
            self._flat = {k: it for k, it in self._flat.items() if not it[0].expired()}
        self._flat[key] = storage.storage_reference(t), size, flat

    def forget(self, t: torch.Tensor) -> None:
        """Note that a tensor has other values than its twin."""
        self._flat.pop(storage.storage_key(t), None)

    def clear(self) -> None:
        """Let all go."""
        self._flat.clear()


class RoundingErrors:
    """Measures rounding errors, in pairs: squares of the differences and of float32's, added up."""

    def __init__(self) -> None:
        self._uncast = Twins()  # of casts: what was cast
        self._twins = Twins()
        self._wide: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

    def before(self, ran: Ran) -> None:
        """Run an op's twins; it may write into its arguments afterwards."""
        own = _run(ran, self._uncast) if any(t.dtype in _LOW for t in ran.reads) else []
        whole = own
        if any(self._twins.of(t) is not None for t in ran.reads):
            whole = _run(ran, self._twins)
        self._wide = own, whole

    def after(self, ran: Ran, made: list[torch.Tensor], bins: Bins | None) -> None:
        """Compare an op's results with its twins', and keep these."""
        own, whole = self._wide
        if bins is not None and made and measurable(made[0]):
            if own and made[0].dtype in _LOW:
                bins.rounding.append(_difference(made[0], own[0]))
            if whole:
                bins.drift.append(_difference(made[0], whole[0]))
        written = _written(ran)
        for t in written:
            self._uncast.forget(t)
            if not whole:
                self._twins.forget(t)
        for t, wide in zip(made or written, whole, strict=False):
            if measurable(t) and t.shape == wide.shape:
                self._twins.put(t, wide)

    def cast(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Note a cast."""
        if not (measurable(source) and measurable(result)):
            return
        wide = source.to(torch.float32, copy=True)
        self._uncast.put(result, wide)
        known = self._twins.of(source)
        self._twins.put(result, wide if known is None else known)

    def gradient(self, t: torch.Tensor, bins: Bins) -> None:
        """Compare a parameter's gradient with its twin."""
        wide = self._twins.of(t)
        if wide is not None:
            bins.drift.append(_difference(t, wide))

    def filled(self, t: torch.Tensor) -> None:
        """Note that a tensor has values that were made of no others."""
        self._uncast.forget(t)
        if self._twins.of(t) is not None:
            self._twins.put(t, t.to(torch.float32, copy=True))

    def clear(self) -> None:
        """Begin a step anew, with the weights that it finds."""
        self._uncast.clear()
        self._twins.clear()


def _run(ran: Ran, twins: Twins) -> list[torch.Tensor]:
    """Run an op on twins, or in float32 where there are none; [] if it has no such form."""
    if torch.Tag.nondeterministic_seeded in ran.func.tags:
        return []
    written, clones = _written(ran), list[torch.Tensor]()

    def wide(tree: object) -> Any:
        if isinstance(tree, torch.Tensor):
            known = twins.of(tree) if measurable(tree) else None
            low = tree.to(torch.float32) if tree.dtype in _LOW else tree
            found = low if known is None else known
            if any(t is tree for t in written):
                found = found.clone()
                clones.append(found)
            return found
        if isinstance(tree, (list, tuple)):
            return type(tree)(map(wide, tree))
        if isinstance(tree, dict):
            return {key: wide(value) for key, value in tree.items()}
        return torch.float32 if tree in _LOW else tree

    try:
        return float_tensors(ran.func(*wide(ran.args), **wide(ran.kwargs))) or clones
    except (RuntimeError, TypeError, ValueError):
        return []


def _written(ran: Ran) -> list[torch.Tensor]:
    return [*dispatcher.written(ran.func, ran.args, ran.kwargs)] if ran.facts.writes else []


def _difference(low: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """The sums of squares of a difference and of float32's values, both of finite ones; [2]."""
    if low.shape != wide.shape:
        return torch.zeros(2, device=low.device)
    some, few = sample(wide).to(torch.float64), sample(low).to(torch.float64)
    both = torch.stack([few - some, some])
    return torch.where(both.isfinite().all(0), both, 0.0).square().sum(1)


def largest(pairs: Sequence[torch.Tensor]) -> float | None:
    """Return the largest relative error of pairs; None without any. Waits for the device."""
    if not pairs:
        return None
    off, whole = torch.stack([pair.cpu() for pair in pairs]).sqrt().T
    found: float = torch.where(off > 0, off / whole, 0.0).max().item()
    return found
