"""Trial calls of a model, after which its attributes, tensors and random state are put back.

`Trial` runs the examples before and after weights are stored in another dtype, and finds the op in
which the two differ.
"""

import contextlib
import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from polymp import code_origin
from polymp.backends.torch.autocast import dtype_names, region_casts
from polymp.backends.torch.compat import modes
from polymp.backends.torch.snapshot import Snapshot
from polymp.backends.torch.weights import freeze_usage
from polymp.backends.torch.weights.freeze_usage import Group, module_path
from polymp.backends.torch.weights.originals import Original
from polymp.errors import PolicyError


class Case(NamedTuple):
    """One example, to be run with gradients enabled or not."""

    example: tuple[Any, ...]
    grad: bool
    at: int


class DtypeReads(TorchFunctionMode):
    """Notes tensors whose dtype the program reads: what depends on it cannot be seen."""

    def __init__(self, groups: Iterable[Group], paths: Mapping[int, str]) -> None:
        super().__init__()
        self.groups: dict[int, Group] = {modes.storage_key(t): g for g in groups for t in g.each()}
        self.paths = paths

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked: Sequence[Any] = ()
        if func in _ASKS:
            asked = args
        elif func is torch.Tensor.to:
            told = (*args[1:], *kwargs.values())
            asked = args if torch.float32 in told else told
        tensors = [t for t in asked if isinstance(t, torch.Tensor)]
        if tensors and not _harmless(sys._getframe(1)):
            for group in filter(None, (self.groups.get(modes.storage_key(t)) for t in tensors)):
                path = module_path(self.paths)
                group.stays(f"its dtype is read in {path}" if path else "its dtype is read")
        return func(*args, **kwargs)


class Trial:
    """The examples, run before and after weights are stored low.

    Args:
        model: the model.
        examples: the arguments of each call.
        kwargs: keyword arguments of all.
        region: the region that the model is frozen for.
        groups: the model's tensors.
        grad: True to run the examples with gradients, too.

    Attributes:
        groups: likewise; `watch` notes in them why they stay as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: Sequence[tuple[Any, ...]],
        kwargs: dict[str, Any],
        region: Any,
        groups: list[freeze_usage.Group],
        grad: bool,
    ) -> None:
        grads = (True, False) if grad else (False,)
        self.groups = groups
        self._cases = [Case(e, grad, at) for at, e in enumerate(examples) for grad in grads]
        self._model, self._kwargs, self._region = model, kwargs, region
        self._name = type(model).__name__
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._plain: list[tuple[Any, list[freeze_usage.Op]]] = []  # of each case: results, and ops
        buffers = {id(t) for t in model.buffers()}
        for group in groups:
            if any(id(t) in buffers for t in group.each()):
                group.save()  # some ops write them without a mark in their schemas

    def watch(self) -> None:
        """Run the examples under autocast, and note why tensors cannot be stored low."""
        for case in self._cases:
            seen = self._uses()
            self._run(case, self._region, seen)
            self._run(case, self._region, asks=DtypeReads(self.groups, self._paths))
            self._plain.append((self._run(case, self._region), seen.ops))
        if not any(tree_leaves(results) for results, _ in self._plain):
            raise PolicyError(
                f"freeze(): {self._name} returns no tensor or number for the examples, so that "
                "nothing can be compared. Give examples for which it returns one."
            )
        for group in self.groups:
            if group.cast and group.forms:
                group.stays(f"used in 8 bits and in {dtype_names.NAMES[self._region.fast_dtype]}")
            elif not group.cast and not group.forms:
                group.stays("not used in the examples")

    def verify(self, originals: Sequence[Original]) -> dict[int, str]:
        """Run the examples with the weights stored low, and compare with the results before."""
        found: dict[int, str] = {}
        places = {modes.storage_key(o.held[0]): at for at, o in enumerate(originals)}
        before = [o.held[0] for o in originals]
        differing = None
        for case, (results, ops) in zip(self._cases, self._plain, strict=True):
            low = self._uses(before)
            try:
                ran_same = freeze_usage.same(self._run(case), results)
                self._run(case, watch=low)
            except Exception as error:
                self._refuse(case, originals, error)
            found |= {places[key]: op for key, op in low.touched.items()}
            if not ran_same or freeze_usage.first_difference(low.ops, ops):
                differing = differing or case
        if differing and not found:
            self._refuse(differing, originals)
        return found

    def _uses(
        self, elsewhere: Sequence[torch.Tensor] = (), digests: bool = False
    ) -> freeze_usage.Uses:
        """Make a watch on the groups; once weights are stored low, its notes do not count."""
        groups = self.groups
        if elsewhere or digests:
            groups = [freeze_usage.Group(group.tensors, "seen already") for group in groups]
        low = self._region.fast_dtype
        return freeze_usage.Uses(groups, low, self._paths, elsewhere, digests)

    def _run(
        self,
        case: Case,
        region: Any = None,
        watch: freeze_usage.Uses | None = None,
        asks: DtypeReads | None = None,
    ) -> list[Any]:
        """Return the results of a call and their gradients; nothing is changed."""
        args, kwargs = _copied((case.example, self._kwargs))
        region_casts.drop()  # the next run would use casts of a region around this
        before = Snapshot(modules=self._model.modules(), random_numbers=True)
        try:
            with torch.set_grad_enabled(case.grad), watch or asks or contextlib.nullcontext():
                with region or contextlib.nullcontext():
                    returned = self._model(*args, **kwargs)
                if watch is not None:
                    watch.returned(list(freeze_usage.leaves(returned)))
                gradients = self._gradients(returned, (args, kwargs))
            parts = [*freeze_usage.leaves(returned), *gradients]
            return [p.detach().clone() if isinstance(p, torch.Tensor) else p for p in parts]
        finally:
            before.put_back()
            for group in self.groups:
                group.put_back()

    def _gradients(self, returned: Any, inputs: Any) -> Sequence[Any]:
        given = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]
        wanted = [t for t in (*self._model.parameters(), *given) if t.requires_grad]
        made = [
            t
            for t in freeze_usage.leaves(returned)
            if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        if not wanted or not made:
            return ()
        ones = [torch.ones_like(t) for t in made]
        return torch.autograd.grad(made, wanted, ones, allow_unused=True)

    def _refuse(
        self, case: Case, originals: Sequence[Original], error: Exception | None = None
    ) -> None:
        """Raise an error with the first op in which the model with low weights differs."""
        low = self._uses(digests=True)
        with contextlib.suppress(Exception):
            self._run(case, watch=low)
        for original in originals:
            original.put_back()
        plain, again = self._uses(digests=True), self._uses(digests=True)
        runs = [self._run(case, self._region, watch) for watch in (plain, again)]
        pairs = zip(plain.ops, again.ops, strict=False)
        steady = [a if a == b else a._replace(digests=()) for a, b in pairs]
        what = f"freeze(): {self._name}, called with example {case.at},"
        if not freeze_usage.same(*runs):
            op = freeze_usage.first_difference(plain.ops, again.ops)
            raise PolicyError(
                f"{what} gives other bits each time, first in {op and op[0]}, so that nothing can "
                "be compared. Call torch.use_deterministic_algorithms(True) before freeze()."
            ) from error
        compared = [
            op if at < len(steady) and steady[at].digests else op._replace(digests=())
            for at, op in enumerate(low.ops)
        ]
        differs = freeze_usage.first_difference(compared, steady)
        ours, theirs = differs or (None, None)
        raised = f" It raises {type(error).__name__}: {error}" if error else ""
        low_dtype = dtype_names.NAMES[self._region.fast_dtype]
        raise PolicyError(
            f"{what} does not run with weights in {low_dtype} as under autocast.{raised} "
            f"The first op that differs is {ours or 'none that is seen'}; under autocast it is "
            f"{theirs or 'not there'}. The model was not changed. Freeze the submodules without "
            "this op."
        ) from error


def _copied(tree: Any) -> Any:
    """Copy the inputs, for a call that may write them; one tensor in two places stays one."""
    made: dict[int, torch.Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        if id(leaf) not in made:
            made[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return made[id(leaf)]

    return tree_map(copied, tree)


# The places in which a program reads the dtype of a tensor: what depends on it cannot be seen.
#
# `freeze` runs the examples under `DtypeReads` once; the tensors that are read stay as they are.
#
# Attributes and functions that read the dtype of a tensor, or its values where no op is seen.
_ASKS = {
    *(getattr(torch.Tensor, name).__get__ for name in ("dtype", "itemsize", "nbytes")),
    *(
        getattr(torch.Tensor, name)
        for name in "element_size type type_as numpy tolist __array__ __dlpack__ data_ptr storage "
        "untyped_storage float double __deepcopy__ __reduce_ex__".split()
    ),
    torch.result_type,
}


# Functions in which the dtype changes nothing in a region: they raise errors outside of regions.
_HARMLESS = {nn.RNNBase.check_input.__code__}


def _harmless(frame: FrameType) -> bool:
    return code_origin.is_ours(frame.f_code.co_filename) or frame.f_code in _HARMLESS
