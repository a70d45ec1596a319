"""Probes of a run in lockstep with it: how far its tensors are moved by the roundings so far.

    each op of the run    runs once more for each probe, on what the probe has in place of its
                          arguments; then its results are moved by a share of their rounding

A tensor that no rounding has moved is the same in all probes, and is kept once. What the probes
have lies in memory as the tensor does, so that it has the same views, and is let go with it.
Nothing of the run is written: not its tensors, and not the state of its random generators.

`polymp.diagnostics.rounding` explains by how much results are moved, and why.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from polymp.backends.torch.compat import distributed, modes
from polymp.backends.torch.diagnostics.measure import written
from polymp.backends.torch.diagnostics.op_call import Ran, float_tensors, tensors
from polymp.backends.torch.diagnostics.perturb import is_exact, result_movement

_SWEEP = 64  # tensors after which those of freed ones are let go


def has_values(t: torch.Tensor) -> bool:
    """Return whether a tensor's numbers are in memory of its own, where its strides say."""
    return (
        t.layout is torch.strided
        and not t.is_meta
        and not t.is_quantized
        and modes.is_plain(t)
        and modes.storage_key(t) != 0
    )


class _Memory(NamedTuple):
    """The memory that a tensor is on, in all probes."""

    of: Any  # a reference to it
    dtype: torch.dtype
    rows: torch.Tensor  # [probes, values in it]


class Probes:
    """What some probes have in place of the tensors of a run."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.left_out = Counter[str]()  # ops whose results are as if no rounding had moved them
        self._memory: dict[int, _Memory] = {}  # by key
        self._moves = 0
        self._copies: dict[int, torch.Tensor] = {}  # of what an op writes that is no float
        self._random: torch.Tensor | None = None  # state of its generator before it

    def of(self, t: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's numbers in all probes, [probes, *t.shape]; None if they are its own."""
        known = self._memory.get(modes.storage_key(t))
        if known is None or known.dtype is not t.dtype or not has_values(t):
            return None
        rows = known.rows
        if t.untyped_storage().nbytes() != rows.shape[1] * t.element_size():  # it was resized
            return None
        return rows.as_strided(
            (self.count, *t.shape), (rows.shape[1], *t.stride()), t.storage_offset()
        )

    def _fits(self, t: torch.Tensor) -> bool:
        """Return whether probes can have a float tensor; it is counted if not."""
        if not has_values(t):
            self.left_out["sparse or wrapped tensors are not in probes"] += 1
        elif t.itemsize == 1:
            self.left_out["8-bit tensors are not in probes"] += 1
        else:
            return t.numel() > 0
        return False

    def _begun(self, t: torch.Tensor) -> torch.Tensor:
        """Return a tensor's numbers in all probes, which may be written."""
        if (found := self.of(t)) is not None:
            return found
        count = t.untyped_storage().nbytes() // t.element_size()
        flat = t.detach().as_strided((count,), (1,), 0)
        return self._kept(t, flat.expand(self.count, count).clone())

    def _kept(self, t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if len(self._memory) % _SWEEP == 0:
            self._memory = {k: it for k, it in self._memory.items() if not it.of.expired()}
        key = modes.storage_key(t)
        self._memory[key] = _Memory(modes.storage_reference(t), t.dtype, rows)
        found = self.of(t)
        assert found is not None
        return found

    def _put(self, t: torch.Tensor, numbers: torch.Tensor) -> None:
        """Give probes their numbers of a tensor."""
        size = t.numel() * t.element_size()
        if t.is_contiguous() and t.untyped_storage().nbytes() == size:
            self._kept(t, numbers.reshape(self.count, -1).contiguous())
        else:
            self._begun(t).copy_(numbers)

    def forget(self, found: Iterable[torch.Tensor]) -> None:
        """Have tensors be the run's own in all probes."""
        for t in found:
            self._memory.pop(modes.storage_key(t), None)

    def unmoved(self, found: Iterable[torch.Tensor]) -> None:
        """Note tensors whose numbers are made of no others."""
        for t in found:
            if (own := self.of(t)) is not None:
                own.copy_(t.detach())

    # What runs

    def before(self, ran: Ran) -> None:
        """Keep what an op is about to change."""
        self._copies, self._random = {}, None
        if _talks(ran):
            return
        for t in written(ran):
            if not t.is_floating_point() or not self._fits(t):
                self._copies[id(t)] = t.detach().clone() if has_values(t) else t
            elif not is_exact(ran.func) or self._moved(ran):
                self._begun(t)
        if torch.Tag.nondeterministic_seeded in ran.func.tags:
            self._random = _generator(ran).get_state()

    def _moved(self, ran: Ran) -> bool:
        """Return whether some argument of an op is not the run's own in all probes."""
        return any(self.of(t) is not None for t in float_tensors(ran.args, ran.kwargs))

    def after(self, ran: Ran, made: list[torch.Tensor]) -> torch.Tensor | None:
        """Run an op in all probes, and move its results.

        Returns how far the first may be from the exact one, number by number; None if it is exact.
        """
        into = [t for t in written(ran) if t.is_floating_point()]
        results = [*made, *(t for t in into if not any(t is m for m in made))]
        if _talks(ran) or self._unsafe():
            self.forget(results)
            return None
        runs: list[list[torch.Tensor]] = []
        if self._moved(ran):
            try:
                runs = self._run(ran)
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                self.left_out["ops that fail in probes"] += 1
                self.forget(results)
                return None
        first = None
        given = {*map(modes.storage_key, tensors(ran.args, ran.kwargs))}
        changed = {*map(modes.storage_key, into)}
        for at, t in enumerate(results):
            key = modes.storage_key(t)
            if (key in given and key not in changed) or not self._fits(t):
                continue  # an alias
            by = None
            if not is_exact(ran.func):
                wide = torch.float64 if t.dtype is torch.float64 else torch.float32
                by = result_movement(
                    ran.func, ran.args, ran.kwargs, ran.reads, None, t.detach(), wide
                )
                first = by if at == 0 else first
            numbers = self.of(t) if key in changed else None
            if numbers is None and at < len(made) and runs:
                numbers = torch.stack([run[at] for run in runs])
            self._move(t, numbers, by)
        return first

    def _unsafe(self) -> bool:
        return any(not has_values(t) for t in self._copies.values())

    def _run(self, ran: Ran) -> list[list[torch.Tensor]]:
        """Run an op in each probe; return the float tensors in its results."""
        if self._random is None:
            return [self._again(ran, at) for at in range(self.count)]
        generator = _generator(ran)
        state, runs = generator.get_state(), []
        try:
            for at in range(self.count):
                generator.set_state(self._random)
                runs.append(self._again(ran, at))
        finally:
            generator.set_state(state)
        return runs

    def _again(self, ran: Ran, at: int) -> list[torch.Tensor]:
        def other(tree: Any) -> Any:
            if isinstance(tree, torch.Tensor):
                if (copy := self._copies.get(id(tree))) is not None:
                    return copy.clone()
                own = self.of(tree)
                return tree if own is None else own[at]
            if isinstance(tree, (list, tuple)):
                return type(tree)(map(other, tree))
            if isinstance(tree, dict):
                return {key: other(value) for key, value in tree.items()}
            return tree

        return float_tensors(ran.func(*other(ran.args), **other(ran.kwargs)))

    def cast(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Cast a tensor in all probes, and move it by the rounding of the cast."""
        if not self._fits(result):
            return
        own = self.of(source)
        by = None
        if result.element_size() < source.element_size():
            by = torch.finfo(result.dtype).eps / 2 * result.detach().to(torch.float32).abs()
        self._move(result, None if own is None else own.to(result.dtype), by)

    def _move(self, t: torch.Tensor, numbers: torch.Tensor | None, by: torch.Tensor | None) -> None:
        """Have probes keep their numbers of a result, moved by a share of `by`."""
        if by is None:
            if numbers is not None:
                self._put(t, numbers)
            else:
                self.forget([t])
            return
        self._moves += 1
        real = t.detach().to(by.dtype)
        # An Inf, such as that of a mask, is not moved, and no number becomes one.
        room = torch.finfo(t.dtype).max - real.abs()
        by = torch.minimum(by, room).nan_to_num(0.0, 0.0, 0.0).copysign(real)
        shares = self._shares(real).to(by.dtype, memory_format=torch.contiguous_format)
        whole = real if numbers is None else numbers.to(by.dtype)
        self._put(t, torch.addcmul(whole, shares, by, value=1 / 128).to(t.dtype))

    def _shares(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return an even share, 128 times it, of each number for each probe: [probes, ...], odd.

        A share is a byte of a hash of the number without its sign: murmur3's finalizer. So equal
        numbers in one result go the same way, as they round the same way.
        """
        kind = torch.int64 if numbers.dtype is torch.float64 else torch.int32
        bits = numbers.abs().view(kind).to(torch.int64)
        found = []
        for word in range(-(-self.count // 8)):
            key = (self._moves << 20) + (word << 56)
            mixed = bits + (key * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) % 2**63
            for factor in (-0x00AE502812AA7333, -0x3B314601E57A13AD):
                mixed = (mixed ^ (mixed >> 33)) * factor
            mixed = (mixed ^ (mixed >> 33)) | 0x0101010101010101
            found.append(mixed.unsqueeze(-1).view(torch.int8))
        return torch.cat(found, -1)[..., : self.count].movedim(-1, 0)


def _talks(ran: Ran) -> bool:
    """Return whether an op sends something to other ranks, or has it from them."""
    return ran.op_call.sends or ran.facts.receives or distributed.talks(ran.func)


def _generator(ran: Ran) -> torch.Generator:
    """Return the generator that an op draws from."""
    for given in (*ran.args, *ran.kwargs.values()):
        if isinstance(given, torch.Generator):
            return given
    device = ran.reads[0].device
    if device.type == "cpu":
        return torch.default_generator
    generators: Any = torch.get_device_module(device).default_generators
    return generators[device.index or 0]  # type: ignore[no-any-return]
