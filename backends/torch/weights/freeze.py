"""`freeze`: weights that a region only ever casts to its low dtype are stored in that dtype.

The examples run under autocast, watched by `freeze_usage`, which finds the tensors that cannot be
stored low, and why. The others are stored low, and the examples must then give the same bits.
"""

import contextlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn as nn

from polymp.backends.torch.autocast import (
    dtype_names,
    fp8_weight,
    policy_code,
    region_casts,
)
from polymp.backends.torch.autocast.api import PolicyLike, autocast
from polymp.backends.torch.modules import subclass
from polymp.backends.torch.modules.scoped import Scoped
from polymp.backends.torch.weights import freezable, freeze_trial, freeze_usage
from polymp.backends.torch.weights.frozen_module import FrozenFor, FrozenModule, is_same
from polymp.backends.torch.weights.in_bits import InBitsOriginal
from polymp.backends.torch.weights.originals import Original, memory, names
from polymp.errors import PolicyError


class Frozen(subclass.Handle):
    """The handle that `freeze` returns: `remove()` gives the model its float32 weights back.

    A weight that was written since, for example by load_state_dict, keeps the values that it has
    now.

    Args:
        model: the frozen model.
        region: the region that it is frozen for.
        groups: its tensors, and why they stay.
        bytes_before: memory of the model's parameters and buffers before, in bytes.
        originals: the float32 tensors; None if they are dropped.

    Attributes:
        stored: names of the parameters and buffers that are stored low, every name of a tied one.
        stored_fp8: those of them that are stored in 8 bits, for products in 8 bits.
        kept: names of the other float ones, and why each stayed as it was.
        dtype: name of the low dtype.
        bytes_before: likewise.
        bytes_after: their memory now, without the originals that `remove()` needs.
    """

    _call: ClassVar[str] = "freeze(model, example_inputs)"

    def __init__(
        self,
        model: nn.Module,
        region: autocast,
        groups: Sequence[freeze_usage.Group],
        bytes_before: int,
        originals: list[Original] | None,
    ) -> None:
        super().__init__(FrozenModule, [model])
        low = {name for g in groups if not g.why for name in g.tensors}
        in_8_bits = {name for g in groups if not g.why and g.forms for name in g.tensors}
        tensors = {name: t for g in groups for name, t in g.tensors.items()}
        every = tuple(names(model))
        self.stored: tuple[str, ...] = tuple(name for name in every if name in low)
        self.stored_fp8: tuple[str, ...] = tuple(name for name in every if name in in_8_bits)
        self.kept: dict[str, str] = {
            name: g.why
            for g in groups
            for name in g.tensors
            if g.why and tensors[name].is_floating_point()
        }
        self.dtype: str = dtype_names.NAMES[region.fast_dtype]
        self.bytes_before = bytes_before
        self.bytes_after: int = memory(model)
        self._model = type(model).__name__
        self._dropped = originals is None
        self._originals = originals or []

    def remove(self) -> None:
        """Give the model its float32 weights back, in the same tensors, and its own class.

        Raises:
            PolicyError: they were dropped, by `freeze(..., drop=True)`.
        """
        if self._dropped:
            raise PolicyError(
                f"freeze(): the float32 weights of {self._model} are gone, because it was frozen "
                f"with drop=True. Its {len(self.stored)} tensors in {self.dtype} are rounded. Load "
                "a checkpoint into a new model."
            )
        for original in self._originals:
            original.give_back(dtype_names.DTYPES[self.dtype])
        self._originals = []
        region_casts.drop()
        super().remove()

    def __repr__(self) -> str:
        return f"Frozen({self._model}, {self._counts('')}, {len(self.kept)} kept)"

    def _counts(self, tensors: str) -> str:
        eight = len(self.stored_fp8)
        counts = f"{len(self.stored) - eight}{tensors} stored in {self.dtype}"
        return f"{counts}, {eight} in 8 bits" if eight else counts

    def __str__(self) -> str:
        before, after = f"{self.bytes_before:,}", f"{self.bytes_after:,}"
        lines = [f"{self._model}: {self._counts(' tensors')}."]
        lines += [f"Bytes of the model: {before} before, {after} now."]
        kept = "The float32 originals are kept as well, for remove()."
        lines += ["The float32 originals are dropped." if self._dropped else kept]
        lines += ["Kept:"] * bool(self.kept) + [
            f"    {why}" for why in freezable.reasons(self.kept)
        ]
        return "\n".join(lines)


def freeze(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | list[tuple[Any, ...]],
    kwargs: dict[str, Any] | None = None,
    *,
    device_type: str | None = None,
    dtype: torch.dtype | str | None = None,
    policy: PolicyLike | None = None,
    drop: bool = False,
) -> Frozen:
    """Store the weights of a model in the low dtype if autocast only ever casts them to it.

        model.eval().requires_grad_(False)
        handle = freeze(model, (x,), dtype=torch.bfloat16, drop=True)
        y = model(x)                         # the bits of autocast, without casts of weights
        print(handle)                        # what is stored low, what stayed, and why

    The model is called with the examples under `autocast(device_type, dtype, policy=policy)`. A
    float32 parameter or buffer that does not require gradients, and that is cast to the low dtype
    at every use, is stored in that dtype. The others stay as they are: tensors that are trained,
    read in float32, written, not used or pinned, or whose dtype the Python program reads, because
    it cannot be seen what depends on it. A weight that only products in 8 bits read is stored in 8
    bits with its scale, as a new object in its place. Tied weights stay tied; tensors that share
    memory are stored low together or not at all. Then outputs, gradients and the sequence of ops
    are compared with those of the model before. They must be the same, bit for bit.

    A frozen model enters its region itself where it is called outside of regions, or in one with
    `enabled=False`. In its own region it runs as it is, so that adapters on a frozen model can be
    trained inside the region of the training loop. Calls that go around the model, such as
    `model.encoder(x)`, `model.forward(x)` or a module that another model shares, need the region
    around them. The model works with deepcopy, pickle and torch.compile. Its state_dict holds the
    low tensors; loading a float32 checkpoint rounds it as the cast does.

    The comparison holds for calls that take the same branches as an example; give one for each
    branch. Nothing is checked later: on another branch a weight may be read in the low dtype
    without an error, and a stored weight that is made to require gradients is trained in the low
    dtype. Freeze in the mode, train or eval, in which the model will run. With gradients enabled
    the examples run with and without them, else only without. Buffers, attributes, and the random
    state of torch, Python and NumPy are put back after each run; other changes are not. Freeze a
    model that has all the modules that use its weights, before it is compiled.

    Args:
        model: any module; it is changed in place, and its parameters stay the same objects, but for
            those that are stored in 8 bits.
        example_inputs: the arguments of one call, a tuple, or a list of such tuples.
        kwargs: keyword arguments of every call.
        device_type: the device type of the weights; None if all are on one.
        dtype: the low dtype, as a name, an alias such as "bf16", or a dtype; None for that of the
            region around, or the device's default.
        policy: as in `autocast`.
        drop: False keeps the float32 originals for `remove()`; True drops them, so that the stored
            weights take half of the memory.

    Returns:
        A handle, not the model.

    Raises:
        TypeError: the model is no module or one that cannot be extended; an example is no tuple; a
            weight is a DTensor, quantized, an inference tensor, or of another tensor class.
        PolicyError: no weight can be stored low; the examples do not give the same bits, and the
            message names the op; or the model, or a part of it, is frozen already. The model is not
            changed then.
    """
    examples = freezable.examples(model, example_inputs, kwargs)
    for path, module in model.named_modules():
        freezable.check(module, path)
    kind = freezable.device(model) if device_type is None else device_type
    if dtype is not None and not isinstance(dtype, torch.dtype):
        dtype = dtype_names.of(dtype, "freeze(): dtype")
    region = autocast(kind, dtype, policy=policy)
    if not region._enabled:
        raise PolicyError(
            f"freeze(): autocast({kind!r}, {region.fast_dtype}) is disabled, see the warning, so "
            "that nothing would run low. Write dtype=torch.bfloat16 or dtype=torch.float16."
        )
    name = type(model).__name__
    frozen_for = FrozenFor(region, model.__dict__.get(Scoped.KEY), name)
    enabled, low = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    scoped = frozen_for.scope is not None
    if enabled and not is_same(region._ticket, scoped, low, *policy_code.in_force()):
        raise PolicyError(
            f"freeze(): called in a region for {dtype_names.NAMES[low]}, and {name} is to be "
            f"frozen for {region!r}. Call freeze() outside of regions."
        )
    groups = freezable.groups(model, kind)
    before, grad = memory(model), torch.is_grad_enabled()
    with (
        torch.inference_mode(False),
        _uncompiled(),
        fp8_weight.noting(freezable.one_by_one(model, groups)),
    ):
        trial = freeze_trial.Trial(model, examples, kwargs or {}, region, groups, grad)
        freezable.refuse_trained(name, groups)
        trial.watch()
        originals = _stored(model, frozen_for, trial)
    for original in originals:
        original.announce()
    region_casts.drop()
    return Frozen(model, region, groups, before, None if drop else originals)


def _stored(model: nn.Module, frozen_for: FrozenFor, trial: freeze_trial.Trial) -> list[Original]:
    """Store the tensors that can be stored low, and verify; keep those with other readers."""
    while True:
        chosen = [group for group in trial.groups if not group.why]
        if not chosen:
            freezable.refuse_nothing(frozen_for.name, trial.groups)
        originals: list[Original] = []
        try:
            for group in chosen:
                originals.append(_original(model, group))
                originals[-1].store(frozen_for.region.fast_dtype)
                group.saved = []
            subclass.extend(model, FrozenModule, frozen_for)
            aliased = trial.verify(originals)
        except BaseException:
            _put_back(model, originals)
            raise
        if not aliased:
            return originals
        _put_back(model, originals)
        for at, op in aliased.items():
            chosen[at].stays(f"read by {op} through a tensor that is no parameter or buffer")


def _original(model: nn.Module, group: freeze_usage.Group) -> Original:
    if group.forms:
        return InBitsOriginal(model, group.each()[0], group.forms)
    return Original(group.each())


def _put_back(model: nn.Module, originals: Iterable[Original]) -> None:
    for original in originals:
        original.put_back()
    subclass.restore(model, FrozenModule)


def _uncompiled() -> Any:
    """Return a context in which compiled functions run as they were written."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")
