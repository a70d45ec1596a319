"""`freeze`: weights that a region only ever casts to its low dtype are stored in that dtype.

The examples run under autocast, watched by `freeze_usage`, which finds the tensors that cannot be
stored low, and why. The others are stored low, and the examples must then give the same bits.
"""

import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
import torch.nn as nn
from torch.compiler import is_dynamo_compiling

from polymp.backends.torch.autocast import dtype_names, fp8_product, region_casts, regions
from polymp.backends.torch.autocast.api import PolicyLike, autocast
from polymp.backends.torch.autocast.fp8_product import Forms, WeightInBits
from polymp.backends.torch.compat import distributed, dynamo, modes
from polymp.backends.torch.modules import subclass
from polymp.backends.torch.modules.pin import Pinned
from polymp.backends.torch.modules.scoped import Scoped
from polymp.backends.torch.weights import freeze_trial, freeze_usage, originals
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
        lines += ["Kept:"] * bool(self.kept) + [f"    {why}" for why in reasons(self.kept)]
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
    examples = checked_examples(model, example_inputs, kwargs)
    for path, module in model.named_modules():
        check_module(module, path)
    kind = device(model) if device_type is None else device_type
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
    if enabled and not is_same(region._ticket, scoped, low, *regions.code_in_force()):
        raise PolicyError(
            f"freeze(): called in a region for {dtype_names.NAMES[low]}, and {name} is to be "
            f"frozen for {region!r}. Call freeze() outside of regions."
        )
    groups = weight_groups(model, kind)
    before, grad = memory(model), torch.is_grad_enabled()
    with (
        torch.inference_mode(False),
        _uncompiled(),
        fp8_product.noting(one_by_one(model, groups)),
    ):
        trial = freeze_trial.Trial(model, examples, kwargs or {}, region, groups, grad)
        refuse_trained(name, groups)
        trial.watch()
        originals = _stored(model, frozen_for, trial)
    for original in originals:
        original.announce()
    region_casts.drop()
    return Frozen(model, region, groups, before, None if drop else originals)


class FrozenFor(NamedTuple):
    """The data of a frozen model.

    Attributes:
        region: the region that it runs in.
        scope: its scope when it was frozen, from `scoped`; None without one.
        name: the name of its class.
    """

    region: autocast
    scope: Any
    name: str


def _stored(model: nn.Module, frozen_for: FrozenFor, trial: freeze_trial.Trial) -> list[Original]:
    """Store the tensors that can be stored low, and verify; keep those with other readers."""
    while True:
        chosen = [group for group in trial.groups if not group.why]
        if not chosen:
            refuse_nothing(frozen_for.name, trial.groups)
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


# Models and tensors that cannot be frozen, and why; found without a call of the model.


def checked_examples(model: Any, inputs: Any, kwargs: Any) -> list[tuple[Any, ...]]:
    """Check the example calls of a model; return a tuple of arguments for each."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"freeze() takes a torch.nn.Module and its inputs, not {model!r}.")
    listed = inputs if isinstance(inputs, list) else [inputs]
    wrong = [type(one).__name__ for one in listed if not isinstance(one, tuple)]
    if wrong or not listed:
        given = f"a list with {wrong[0]} in it" if wrong else "an empty list"
        given = given if isinstance(inputs, list) else wrong[0]
        named = " Write freeze(model, (), kwargs=...) for inputs by keyword." * ("dict" in wrong)
        raise TypeError(
            f"freeze() takes the inputs of {type(model).__name__} as a tuple, such as (x,), or a "
            f"list of tuples, not as {given}.{named}"
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(f"freeze() takes kwargs as a dict, not as {type(kwargs).__name__}.")
    return listed


def check_module(module: nn.Module, path: str) -> None:
    """Refuse a module that cannot be frozen, or that has tensors that cannot."""
    odd = (torch.jit.ScriptModule, nn.modules.lazy.LazyModuleMixin)
    what = f"freeze(): {type(module).__name__}" + (f" at {path!r}" if path else "")
    if not path or isinstance(module, odd):
        subclass.check(module, path, "freeze")
        if module._compiled_call_impl is not None:
            raise TypeError(f"{what} is compiled by its own compile(). Freeze it before that.")
    if FrozenModule.KEY in module.__dict__:
        raise PolicyError(
            f"{what} is frozen already, for {module.__dict__[FrozenModule.KEY].region!r}. "
            "Take that off first, by remove() of the handle that freeze() returned."
        )
    for name, t in (*module._parameters.items(), *module._buffers.items()):
        if t is not None and (odd_kind := _odd(t)):
            raise TypeError(f"{what} has {name!r}, {odd_kind}. {_INSTEAD}")


_INSTEAD = "Freeze a model whose parameters and buffers are plain tensors."


def _odd(t: torch.Tensor) -> str:
    """Return why freeze() cannot store a tensor of this kind; "" for a plain one."""
    if t.is_quantized:
        return "which is quantized"
    if t.is_meta:
        return "which is on meta, without values"
    if not modes.is_plain(t):
        return f"whose class, {type(t).__name__}, changes what ops do"
    if t.is_inference():
        return "an inference tensor, made under torch.inference_mode()"
    return "a part of FSDP's flat parameter" if distributed.in_fsdp1(t) else ""


def device(model: nn.Module) -> str:
    """Return the device type that a model's float tensors are on."""
    found = {t.device.type for t in originals.names(model).values() if t.is_floating_point()}
    if len(found) != 1:
        name = type(model).__name__
        if not found:
            raise PolicyError(f"freeze(): {name} has no float tensors to store.")
        raise PolicyError(
            f"freeze(): the float tensors of {name} are on {', '.join(sorted(found))}. "
            "Name the device to freeze: freeze(..., device_type='cuda')."
        )
    return found.pop()


def weight_groups(model: nn.Module, device: str) -> list[freeze_usage.Group]:
    """Group the model's tensors by their memory, with reasons to keep them that need no call."""
    pinned = {
        id(t)
        for m in model.modules()
        if Pinned.KEY in m.__dict__
        for _, t in m.__dict__[Pinned.KEY].tensors(m)
    }
    sharing: dict[int, dict[str, torch.Tensor]] = {}
    for name, t in originals.names(model).items():
        sharing.setdefault(modes.storage_key(t) or id(t), {})[name] = t
    groups = []
    for tensors in sharing.values():
        group = freeze_usage.Group(tensors)
        for name, t in tensors.items():
            if why := "pinned to float32" if id(t) in pinned else _why(t, device):
                alone = all(other is t for other in tensors.values())
                group.stays(why if alone else f"shares memory with {name!r}: {why}")
        groups.append(group)
    return groups


def one_by_one(
    model: nn.Module, groups: Iterable[freeze_usage.Group]
) -> list[tuple[torch.Tensor, Forms]]:
    """Return the tensors that could be stored in 8 bits, each with the forms of its group.

    Tensors that share memory are stored together, and in 8 bits they would share none. A recurrent
    layer is one op in inference mode, which no weight in 8 bits can be given to.
    """
    recurrent = nn.RNNBase, nn.RNNCellBase
    layers = [module for module in model.modules() if isinstance(module, recurrent)]
    others = {id(t) for layer in layers for t in layer.parameters()}
    free = [group for group in groups if not group.why and len(group.each()) == 1]
    pairs = [(group.each()[0], group.forms) for group in free]
    return [(t, forms) for t, forms in pairs if id(t) not in others]


def _why(t: torch.Tensor, device: str) -> str:
    """Return why a tensor cannot be stored low in any use; "" if it can."""
    if t.requires_grad:
        return "requires gradients"
    if t.dtype is not torch.float32:
        return f"is {dtype_names.NAMES[t.dtype]}"
    if t.device.type != device:
        return f"is on {t.device.type}"
    if t.layout is not torch.strided:
        return f"is {str(t.layout).removeprefix('torch.')}"
    return "is empty" if t.numel() == 0 else ""


def refuse_trained(name: str, groups: Iterable[freeze_usage.Group]) -> None:
    """Raise if every tensor that could be stored low is trained."""
    trained = [n for g in groups for n, t in g.tensors.items() if t.requires_grad]
    if trained and all(g.why for g in groups):
        raise PolicyError(
            f"freeze(): all parameters of {name} that could be stored low, {len(trained)} of them, "
            "require gradients. Call requires_grad_(False) first on those that are not trained, or "
            "model.requires_grad_(False). Those that are trained stay float32."
        )


def refuse_nothing(name: str, groups: Iterable[freeze_usage.Group]) -> NoReturn:
    """Raise an error with the reasons why no tensor can be stored low."""
    why = {n: g.why for g in groups for n, t in g.tensors.items() if t.is_floating_point()}
    shown = reasons(why)
    more = f"; and {len(shown) - 6} more reasons" if len(shown) > 6 else ""
    trained = any(t.requires_grad for g in groups for t in g.tensors.values())
    hint = " For weights that are not trained call requires_grad_(False) first." if trained else ""
    raise PolicyError(
        f"freeze(): no weight of {name} can be stored low. {'; '.join(shown[:6])}{more}.{hint}"
    )


def reasons(kept: Mapping[str, str]) -> list[str]:
    """Return the reasons why tensors stay, a line for each."""
    reasons: dict[str, list[str]] = {}
    for name, why in kept.items():
        reasons.setdefault(why, []).append(name)
    return [
        f"{', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)}: {why}"
        for why, names in reasons.items()
    ]


# `FrozenModule`: the class of a frozen model, which enters its region when it is called.


class FrozenModule(subclass.Extension):
    """A model's class, once frozen."""

    KEY: ClassVar[str] = "_polymp_freeze"

    def _call_impl(self, *args: object, **kwargs: object) -> Any:
        """Call the module, also by a `__call__` that was bound before. Since torch 1.8."""
        frozen_for = self.__dict__.get(FrozenModule.KEY)
        if frozen_for is None:
            above: Any = super() if isinstance(self, FrozenModule) else self  # bound, then removed
            return above._call_impl(*args, **kwargs)
        region, scope = frozen_for.region, self.__dict__.get(Scoped.KEY)
        if scope is not frozen_for.scope:
            _refuse_scope(frozen_for.name)
        device = region.device
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        code = regions.code_in_force()
        if _fits(region._ticket, frozen_for.name, scope is not None, enabled, dtype, *code):
            return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        with region._again() if is_dynamo_compiling() else region:
            return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


@dynamo.at_trace_time
def _refuse_scope(name: str) -> NoReturn:
    raise PolicyError(
        f"{name} has other rules from scoped() than when it was frozen. Call remove() of the "
        "handle that freeze() returned, and freeze the model again."
    )


@dynamo.at_trace_time
def _fits(
    ticket: str, name: str, scoped: bool, enabled: bool, dtype: torch.dtype, *code: torch.dtype
) -> bool:
    """Return whether the region in force is equal to the ticket's; False if there is none."""
    if not enabled:
        return False
    if is_same(ticket, scoped, dtype, *code):
        return True
    region = regions.prepared.by_ticket[ticket][0]
    policy = regions.policy_at(region.device, *code)
    here = _spelled(region.device, dtype_names.NAMES[dtype], policy)
    frozen = _spelled(region.device, region.dtype, region.policy)
    raise PolicyError(
        f"{name} was frozen for {frozen}, and is called in {here}. Call it in the first region, or "
        "outside of regions, where it enters that one by itself; or freeze it for the second."
    )


def is_same(ticket: str, scoped: bool, dtype: torch.dtype, *code: torch.dtype) -> bool:
    """Return whether a region of this dtype and these policies is equal to the ticket's."""
    region = regions.prepared.by_ticket[ticket][0]
    policy = regions.policy_at(region.device, *code)
    same = scoped or policy is region.policy or policy == region.policy
    return same and dtype is dtype_names.DTYPES[region.dtype]


def _spelled(device: str, dtype: str, policy: Any) -> str:
    rules = "" if policy is None else f", policy={policy.name!r}"
    return f"autocast({device!r}, torch.{dtype}{rules})"


# `InBitsOriginal`: a weight of a model in whose place one is put that is stored in 8 bits.


class InBitsOriginal(Original):
    """A weight, and its places in a model. Unlike in 16 bits, another object takes these places.

    Args:
        model: the model.
        weight: its parameter or buffer.
        forms: of the weight.
    """

    def __init__(self, model: nn.Module, weight: torch.Tensor, forms: Forms) -> None:
        super().__init__([weight])
        self._places: list[tuple[dict[str, Any], str]] = [
            (table, name)
            for module in model.modules()
            for table in (module._parameters, module._buffers)
            for name, t in table.items()
            if t is weight
        ]
        made: torch.Tensor = WeightInBits(forms)
        if isinstance(weight, nn.Parameter):
            made = nn.Parameter(made, requires_grad=False)
        self._made = made

    def store(self, dtype: torch.dtype) -> None:
        """Put the weight in 8 bits in the places of the other."""
        self._put(self._made)

    def put_back(self) -> None:
        """Put the old weight in its places."""
        self._put(self.tensors[0])

    def announce(self) -> None:
        """Do nothing: the old weight was not written."""

    def give_back(self, low: torch.dtype) -> None:
        """Put the old weight in its places, with the values of the new one if it was written."""
        (weight,), made = self.tensors, self._made
        assert isinstance(made, WeightInBits)
        values = self.held[0]
        if any(not _same(form, how(values.to(made.device))) for how, form in made.forms.items()):
            values = made.values()
        weight.data = values.to(made.device)
        self._put(weight)

    def _put(self, t: torch.Tensor) -> None:
        for table, name in self._places:
            now = table.get(name)
            if now is self._made or now is self.tensors[0]:  # not one that was assigned
                table[name] = t


def _same(form: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(map(freeze_usage.same_bits, form, other))
