"""A run of a function, and runs of it in which the result of every op is moved by its rounding.

`moved_numbers` moves the results; `polymp.diagnostics.rounding` explains by how much, and why. They
are moved below autograd, so that the backward pass is that of the moved run, and is moved itself.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.autocast.api import PolicyLike, autocast
from polymp.backends.torch.compat import modes, storage
from polymp.backends.torch.diagnostics.explain import call_of
from polymp.backends.torch.diagnostics.moved_numbers import Chance
from polymp.backends.torch.diagnostics.op_call import OpCall, Ran
from polymp.backends.torch.diagnostics.op_kinds import facts_of, float_tensors, is_cast
from polymp.backends.torch.diagnostics.op_tracer import OpTracer
from polymp.diagnostics import trees
from polymp.diagnostics.rounding import Run, Step


class _Probe(modes.OpMode):
    """Moves the results of ops, and notes nothing."""

    def __init__(self, chance: Chance) -> None:
        super().__init__()
        self._chance = chance
        self.looks_away = False

    def op(self, func: modes.Op, types: modes.Types, args: modes.Args, kwargs: modes.Kwargs) -> Any:
        result: Any = func(*args, **kwargs)
        if (
            self.looks_away
            or not isinstance(func, torch._ops.OpOverload)
            or facts_of(func).kind != "computes"
        ):
            return result
        if func is torch.ops.aten._to_copy.default and is_cast(args[0], kwargs):
            self._chance.cast(args[0], result)
        elif reads := float_tensors(*args, *kwargs.values()):
            self._chance.op(func, args, kwargs, reads, result, float_tensors(result))
        return result


class Moved(OpTracer):
    """Follows one run after the other; moves results by their rounding, and keeps them if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.start()

    def start(self, seed: int | None = None, keep: bool = False) -> None:
        """Forget the last run, and begin another."""
        self.looks_away = False
        self.calls.clear()
        self._origins.forget()
        self._chance = None if seed is None else Chance(seed)
        self._keep = keep
        self._values: dict[int, tuple[torch.Tensor, ...]] = {}
        self._reads: dict[int, set[int]] = {}
        self._maker: dict[int, int] = {}  # storage: the call whose result it holds
        self._alive: list[Any] = []

    def before(self, ran: Ran) -> None:
        if self._keep:
            self._note_reads(ran.op_call, (ran.args, ran.kwargs))

    def _note_reads(self, op_call: OpCall, tree: object) -> None:
        reads = self._reads.setdefault(id(op_call), set())
        for t in tree_leaves(tree):
            if isinstance(t, torch.Tensor):
                maker = self._maker.get(storage.storage_key(t))
                if maker not in (None, id(op_call)):
                    reads.add(maker)

    def after(self, ran: Ran, result: object, made: list[torch.Tensor], kept: object) -> None:
        if self._chance is not None:
            self._chance.op(ran.func, ran.args, ran.kwargs, ran.reads, result, made)
        if self._keep and made:
            self._values[id(ran.op_call)] = tuple(t.detach().double().clone() for t in made)
            for t in made:
                self._made(t, id(ran.op_call))

    def after_cast(self, op_call: OpCall, source: torch.Tensor, result: torch.Tensor) -> None:
        if self._chance is not None:
            self._chance.cast(source, result)
        if self._keep:
            self._note_reads(op_call, source)
            maker = self._maker.get(storage.storage_key(source))
            self._made(result, id(op_call) if maker is None else maker)

    def _made(self, t: torch.Tensor, maker: int) -> None:
        self._maker[storage.storage_key(t)] = maker
        self._alive.append(storage.storage_reference(t))

    def steps(self) -> tuple[Step, ...]:
        """Return the calls of the run, in order."""
        at = self._places()
        return tuple(
            Step(
                call_of(op_call),
                tuple(v.numpy() for v in self._values.get(id(op_call), ())),
                frozenset(at[r] for r in self._reads.get(id(op_call), ()) if r in at),
            )
            for op_call in self.calls
        )

    def maker(self, t: torch.Tensor) -> int | None:
        """Return the place of the call that made a tensor; None if none did or nothing is kept."""
        return self._places().get(self._maker.get(storage.storage_key(t), -1))

    def _places(self) -> dict[int, int]:
        return {id(op_call): number for number, op_call in enumerate(self.calls)}


class Program:
    """A function and its arguments, to be run under its tracer: `with program.watch: ...`.

    Args:
        fn: takes tensors.
        args: trees of numpy arrays.
        kwargs: likewise.
        dtype: the low dtype of a region on the CPU; None for no region.
        policy: of the region.
        cotangent: returns the gradient with respect to a result, from its path and shape; None to
            run no backward pass.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dtype: str | None,
        policy: PolicyLike,
        cotangent: Callable[[str, tuple[int, ...]], Any] | None,
    ) -> None:
        self.watch: Moved = Moved()
        self.watch.looks_away = True  # between runs
        self._fn = fn
        self._tree = tuple(args), dict(kwargs)
        self._dtype = dtype
        self._policy = policy
        self._cotangent = cotangent
        self._made: dict[str, torch.Tensor] = {}  # by the last run

    def probe(self, seed: int) -> Run:
        """Run it moved, outside of the tracer; see `Chance`."""
        with _Probe(Chance(seed)) as probe:
            return self._ran(probe)

    def run(self, seed: int | None = None, keep: bool = False) -> Run:
        """Run the function, and differentiate it, while the tracer follows; see `Moved.start`."""
        self.watch.start(seed, keep)
        found = self._ran(self.watch)
        makers = {name: self.watch.maker(t) for name, t in self._made.items()}
        self._made = {}
        return found._replace(
            steps=self.watch.steps(), makers={n: at for n, at in makers.items() if at is not None}
        )

    def _ran(self, follower: "Moved | _Probe") -> Run:
        follower.looks_away = True
        made = {path: tensor(x) for path, x in trees.arrays(self._tree).items()}
        inputs: dict[str, torch.Tensor] = {}
        if self._cotangent is not None:
            inputs = {p: t.requires_grad_() for p, t in made.items() if t.is_floating_point()}
        args, kwargs = trees.rebuilt(self._tree, iter(made.values()))
        follower.looks_away = False
        with ExitStack() as region:
            if self._dtype is not None:
                dtype = dtype_names.DTYPES[self._dtype]
                region.enter_context(autocast("cpu", dtype, policy=self._policy))
            results = trees.results(self._fn(*args, **kwargs), "torch")
        gradients = self._gradients(results, inputs, follower) if inputs else {}
        follower.looks_away = True
        self._made = {f"results{path}": t for path, t in results.items()}
        self._made |= {f"gradients{path}": t for path, t in gradients.items()}
        return Run(
            {path: _array(t) for path, t in results.items()},
            {path: _array(g) for path, g in gradients.items()},
            {path: str(t.dtype).removeprefix("torch.") for path, t in results.items()},
        )

    def _gradients(
        self,
        results: Mapping[str, torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
        follower: "Moved | _Probe",
    ) -> dict[str, torch.Tensor]:
        wanted = {path: t for path, t in results.items() if t.requires_grad}
        if not wanted or self._cotangent is None:
            return {path: torch.zeros_like(t) for path, t in inputs.items()}
        follower.looks_away = True
        seeds = [tensor(self._cotangent(p, tuple(t.shape)), t.dtype) for p, t in wanted.items()]
        follower.looks_away = False
        found = torch.autograd.grad(
            [*wanted.values()], [*inputs.values()], seeds, allow_unused=True
        )
        pairs = zip(inputs.items(), found, strict=True)
        return {path: torch.zeros_like(t) if g is None else g for (path, t), g in pairs}


def tensor(x: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Make a tensor of a numpy array, with memory of its own; no op of a run."""
    made = torch.from_numpy(np.array(x, "float32" if x.dtype.name == "bfloat16" else None))
    return made.to(torch.bfloat16 if x.dtype.name == "bfloat16" else dtype or made.dtype)


def _array(t: torch.Tensor) -> Any:
    t = t.detach()
    return (t.double() if t.is_floating_point() else t).numpy()
