"""Probes of a run in lockstep with it: how far its tensors are moved by the roundings so far.

    each op of the run    runs once more for each probe, on what the probe has in place of its
                          arguments; then its results are moved by a share of their rounding

A tensor that no rounding has moved is the same in all probes, and is kept once. What the probes
have lies in memory as the tensor does, so that it has the same views, and is let go with it.
Nothing of the run is written: not its tensors, and not the state of its random generators.

`polymp.diagnostics.rounding` explains by how much results are moved, and why.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from polymp.backends.torch.compat import distributed, modes
from polymp.backends.torch.diagnostics.measure import Twins
from polymp.backends.torch.diagnostics.op_call import Ran, float_tensors, tensors
from polymp.backends.torch.diagnostics.perturb import (
    is_exact,
    move,
    result_movement,
    rounds_operands,
    stored_movement,
    wide,
)
from polymp.diagnostics import rounding


def has_values(t: torch.Tensor) -> bool:
    """Return whether a tensor's numbers are in memory of its own, where its strides say."""
    return (
        t.layout is torch.strided
        and not t.is_meta
        and not t.is_quantized
        and modes.is_plain(t)
        and modes.storage_key(t) != 0
    )


class Probes:
    """The numbers that some probes, if any, have in place of the tensors of a run."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.left_out = Counter[str]()  # ops whose results are as if no rounding had moved them
        self._numbers = Twins(count)
        self._moves = 0
        self._copies: dict[int, torch.Tensor] = {}  # of what an op writes that is no float
        self._random: torch.Tensor | None = None  # state of its generator before it

    def of(self, t: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's numbers in all probes, [probes, *t.shape]; None if they are its own."""
        return self._numbers.of(t)

    def _fits(self, t: torch.Tensor) -> bool:
        """Return whether probes can have a float tensor; it is counted if not."""
        if not has_values(t):
            self.left_out["sparse or wrapped tensors are not in probes"] += 1
        elif t.itemsize == 1:
            self.left_out["8-bit tensors are not in probes"] += 1
        else:
            return t.numel() > 0
        return False

    def forget(self, found: Iterable[torch.Tensor]) -> None:
        """Have tensors be the run's own in all probes."""
        self._numbers.forget(found)

    def unmoved(self, t: torch.Tensor) -> None:
        """Note a tensor whose numbers are made of no others."""
        if (own := self.of(t)) is not None:
            own.copy_(t.detach())

    # What runs

    def before(self, ran: Ran) -> None:
        """Keep what an op is about to change."""
        self._copies, self._random = {}, None
        if not self.count or _talks(ran):
            return
        for t in ran.into:
            if not t.is_floating_point() or not self._fits(t):
                self._copies[id(t)] = t.detach().clone() if has_values(t) else t
            elif not is_exact(ran.func) or self._moved(ran):
                self._numbers.begun(t)
        if torch.Tag.nondeterministic_seeded in ran.func.tags:
            self._random = _generator(ran).get_state()

    def _moved(self, ran: Ran) -> bool:
        """Return whether some argument of an op is not the run's own in all probes."""
        return any(self.of(t) is not None for t in float_tensors(ran.args, ran.kwargs))

    def after(self, ran: Ran, result: object, made: list[torch.Tensor]) -> torch.Tensor | None:
        """Run an op in all probes, and move its results.

        Returns the norm of how far the first may be from the exact one; None if it is exact.
        """
        if not self.count:
            return None
        into = [t for t in ran.into if t.is_floating_point()]
        results = [*made, *(t for t in into if not any(t is m for m in made))]
        if _talks(ran):
            self.left_out["what comes from other ranks is not in probes"] += 1
            self.forget(results)
            return None
        try:
            return self._follow(ran, result, made, into, results)
        except Exception:  # of an op that is like no other: the program goes on
            self.left_out["ops that fail in probes"] += 1
            self.forget(results)
            return None

    def _follow(
        self,
        ran: Ran,
        result: object,
        made: list[torch.Tensor],
        into: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> torch.Tensor | None:
        if not all(map(has_values, self._copies.values())):
            raise TypeError("it writes a tensor that cannot be copied")
        narrow = rounds_operands(ran, result)
        runs = self._run(ran, narrow) if narrow or self._moved(ran) else []
        # Of an optimizer, the last rounding counts, that of the new parameter: see `updated`.
        moves = not (is_exact(ran.func) or ran.op_call.place.updating)
        given = {*map(modes.storage_key, tensors(ran.args, ran.kwargs))}
        changed = {*map(modes.storage_key, into)}
        norm = None
        for at, t in enumerate(results):
            key = modes.storage_key(t)
            if (key in given and key not in changed) or not self._fits(t):
                continue  # an alias
            by = None
            if moves:
                by = result_movement(ran, result, t.detach(), wide(t))
            if key in changed:
                if by is not None:
                    self._move(t, self._numbers.begun(t), by)
            elif runs or by is not None:
                numbers = torch.stack([run[at] for run in runs]) if runs else self._same(t)
                self._numbers.put(t, self._move(t, numbers, by))
            if at == 0 and by is not None:
                norm = torch.linalg.vector_norm(by)
                if narrow:
                    moved = torch.linalg.vector_norm(t.detach())
                    norm = norm + rounding.of_operands(narrow) * moved
        return norm

    def _run(self, ran: Ran, narrow: str) -> list[list[torch.Tensor]]:
        """Run an op in each probe; return the float tensors in its results.

        Float32 operands are moved by their rounding to the format `narrow`, if it has one.
        """
        runs, before = [], self._random
        generator = None if before is None else _generator(ran)
        state = None if generator is None else generator.get_state()
        try:
            given = self._each(ran.args, narrow), self._each(ran.kwargs, narrow)
            for args, kwargs in zip(*given, strict=True):
                if generator is not None and before is not None:
                    generator.set_state(before)
                runs.append(float_tensors(ran.func(*args, **kwargs)))
        finally:
            if generator is not None and state is not None:
                generator.set_state(state)
        return runs

    def _each(self, tree: Any, narrow: str = "") -> Sequence[Any]:
        """Return what each probe has in place of an op's arguments."""
        if isinstance(tree, torch.Tensor):
            if (copy := self._copies.get(id(tree))) is not None:
                return [copy.clone() for _ in range(self.count)]
            own = self.of(tree) if tree.is_floating_point() else None
            if narrow and tree.dtype is torch.float32:
                by = tree.detach().abs().mul_(rounding.unit_roundoff(narrow))
                own = self._same(tree) if own is None else own.clone()
                move(own.unbind(), tree.detach(), by, 0)  # in every op that reads it alike
            return [tree] * self.count if own is None else own.unbind()
        if isinstance(tree, (list, tuple)) and tree:
            each = zip(*(self._each(x, narrow) for x in tree), strict=True)
            return [type(tree)(items) for items in each]
        if isinstance(tree, dict) and tree:
            values = self._each([*tree.values()], narrow)
            return [dict(zip(tree, found, strict=True)) for found in values]
        return [tree] * self.count

    def cast(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Cast a tensor in all probes, and move it by the rounding of the cast."""
        if not self.count or not self._fits(result):
            return
        narrows = result.element_size() < source.element_size()
        own, by = self.of(source), stored_movement(result, wide(result)) if narrows else None
        if own is not None or by is not None:
            numbers = self._same(result) if own is None else own.to(result.dtype)
            self._numbers.put(result, self._move(result, numbers, by))

    def updated(self, t: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a parameter after its update, moved by the rounding of that."""
        own = self.of(t)
        numbers = self._same(t) if own is None else own.clone()
        return self._move(t, numbers, stored_movement(t, wide(t)))

    def _same(self, t: torch.Tensor) -> torch.Tensor:
        """Return a tensor's own numbers, once for each probe."""
        whole = t.detach().expand(self.count, *t.shape)
        return whole.clone(memory_format=torch.contiguous_format)

    def _move(
        self, t: torch.Tensor, numbers: torch.Tensor, by: torch.Tensor | None
    ) -> torch.Tensor:
        """Move the numbers of a tensor in all probes by shares of `by`, which is changed, too."""
        if by is not None:
            self._moves += 1
            move(numbers.unbind(), t.detach(), by, self._moves)
        return numbers


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
