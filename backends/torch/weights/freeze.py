"""`freeze`: weights that a region only ever casts to its low format are stored in that format.

In go a model and example calls; out comes a handle. The examples run under autocast, watched by
`freeze_usage`, which says of each tensor why it cannot be stored low, if there is a reason. What is
left is stored low, and the examples must then give the same bits. What a policy says is not known
here.
"""

import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from polymp.backends.torch.autocast import (
    cast_cache,
    dtype_names,
    policy_code,
    regions,
    weight_cast_cache,
)
from polymp.backends.torch.autocast.api import PolicyLike, autocast
from polymp.backends.torch.compat import distributed, dynamo, modes, storage
from polymp.backends.torch.modules import subclass
from polymp.backends.torch.modules.pin import Pinned
from polymp.backends.torch.modules.scoped import Scoped
from polymp.backends.torch.weights import freeze_trial, freeze_usage
from polymp.errors import PolicyError


class Place(NamedTuple):
    """What a frozen model knows.

    Attributes:
        region: in which it runs.
        scope: what `scoped` had put on it; None for nothing.
        name: of its class.
    """

    region: autocast
    scope: Any
    name: str


class FrozenModule(subclass.Extension):
    """A model's class, once frozen."""

    KEY = "_polymp_freeze"

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """What calling a module comes to, also by a `__call__` bound before. Since torch 1.8."""
        place = self.__dict__.get(FrozenModule.KEY)
        if place is None:
            above: Any = super() if isinstance(self, FrozenModule) else self  # bound, then removed
            return above._call_impl(*args, **kwargs)
        region, scope = place.region, self.__dict__.get(Scoped.KEY)
        if scope is not place.scope:
            _refuse_scope(place.name)
        device = region.device
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        code = policy_code.in_force()
        if _fits(region._ticket, place.name, scope is not None, enabled, dtype, *code):
            return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        with region._again() if is_dynamo_compiling() else region:
            return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


@dynamo.at_trace_time
def _refuse_scope(name: str) -> NoReturn:
    raise PolicyError(
        f"the rules that scoped() gives {name} are others than when it was frozen. "
        "Call remove() of the handle that freeze() returned, and freeze it again."
    )


@dynamo.at_trace_time
def _fits(
    ticket: str, name: str, scoped: bool, enabled: bool, dtype: torch.dtype, *code: torch.dtype
) -> bool:
    """True if the region in force is the ticket's, or as good; False if there is none.

    Args:
        ticket: of the region that a model was frozen for.
        name: what to call the model.
        scoped: True if the model has rules of its own, which hold instead of a region's.
        enabled: as torch says for the device in force.
        dtype: the low format in force.
        code: of the policies in force.

    Raises:
        PolicyError: it is another one.
    """
    if not enabled:
        return False
    if _is_same(ticket, scoped, dtype, *code):
        return True
    region = regions.known[ticket][0]
    policy = policy_code.policy_at(region.device, *code)
    here = _spelled(region.device, dtype_names.NAMES[dtype], policy)
    frozen = _spelled(region.device, region.format, region.policy)
    raise PolicyError(
        f"{name} was frozen for {frozen}, and is called in {here}. Call it in that region or "
        "outside of all, where it enters its own; or freeze it for this one."
    )


def _is_same(ticket: str, scoped: bool, dtype: torch.dtype, *code: torch.dtype) -> bool:
    region = regions.known[ticket][0]
    policy = policy_code.policy_at(region.device, *code)
    same = scoped or policy is region.policy or policy == region.policy
    return same and dtype is dtype_names.DTYPES[region.format]


def _spelled(device: str, format: str, policy: Any) -> str:
    rules = "" if policy is None else f", policy={policy.name!r}"
    return f"autocast({device!r}, torch.{format}{rules})"


class Frozen(subclass.Handle):
    """What `freeze` returns: `remove()` gives the model its float32 weights back.

    A weight that was written since, by load_state_dict say, comes back with what it holds now.

    Attributes:
        stored: names of the parameters and buffers that are stored low, every name of a tied one.
        kept: names of the other float ones, and why each stayed as it was.
        format: the low format.
        bytes_before: memory of the model's parameters and buffers as they were.
        bytes_after: that of what the model holds now. What `remove()` needs is not in it.
    """

    _call: ClassVar[str] = "freeze(model, example_inputs)"

    def __init__(
        self,
        model: nn.Module,
        region: autocast,
        groups: Sequence[freeze_usage.Group],
        bytes_before: int,
        originals: "list[freeze_trial.Original] | None",
    ) -> None:
        super().__init__(FrozenModule, [model])
        low = {name for g in groups if not g.why for name in g.tensors}
        tensors = {name: t for g in groups for name, t in g.tensors.items()}
        self.stored = tuple(name for name in freeze_trial.names(model) if name in low)
        self.kept = {
            name: g.why
            for g in groups
            for name in g.tensors
            if g.why and tensors[name].is_floating_point()
        }
        self.format = dtype_names.NAMES[region.fast_dtype]
        self.bytes_before = bytes_before
        self.bytes_after = freeze_trial.memory(model)
        self._model = type(model).__name__
        self._dropped = originals is None
        self._originals = originals or []

    def remove(self) -> None:
        """Give the model its weights in float32 back, the same tensors, and its own class.

        Raises:
            PolicyError: they were dropped.
        """
        if self._dropped:
            raise PolicyError(
                f"freeze(): the float32 weights of {self._model} are gone, because it was frozen "
                f"with drop=True. Its {len(self.stored)} tensors in {self.format} do not hold what "
                "was rounded off. Load a checkpoint into a new model."
            )
        for original in self._originals:
            original.give_back(dtype_names.DTYPES[self.format])
        self._originals = []
        cast_cache.drop()
        super().remove()

    def __repr__(self) -> str:
        counts = f"{len(self.stored)} stored in {self.format}, {len(self.kept)} kept"
        return f"Frozen({self._model}, {counts})"

    def __str__(self) -> str:
        before, after = f"{self.bytes_before:,}", f"{self.bytes_after:,}"
        lines = [f"{self._model}: {len(self.stored)} tensors stored in {self.format}."]
        lines += [f"Bytes of the model: {before} before, {after} now."]
        kept = "The float32 originals are kept as well, for remove()."
        lines += ["The float32 originals are dropped." if self._dropped else kept]
        lines += ["Kept:"] * bool(self.kept) + [f"    {why}" for why in _shown(self.kept)]
        return "\n".join(lines)


def freeze(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | list[tuple[Any, ...]],
    kwargs: dict[str, Any] | None = None,
    *,
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
    policy: PolicyLike | None = None,
    drop: bool = False,
) -> Frozen:
    """Store a model's weights in the low format where autocast would only ever cast them to it.

        model.eval().requires_grad_(False)
        handle = freeze(model, (x,), dtype=torch.bfloat16, drop=True)
        y = model(x)                         # the bits of autocast, without a cast of a weight
        print(handle)                        # what is stored low, what stayed, and why

    The model is called with the examples under `autocast(device_type, dtype, policy=policy)`. A
    float32 parameter or buffer that does not require gradients, and that is cast to the low format
    at every use, is stored in that format. The rest stays: what is trained, read in float32,
    written, not used, pinned, or whose dtype the Python program asks for, since what it does with
    the answer cannot be seen. Tied weights stay tied; tensors that share memory are stored low
    together or not at all. Before this holds, outputs, gradients of what requires them, and the
    sequence of ops are compared with those of the model as it was. They must be the same, bit for
    bit.

    A frozen model enters its region itself where it is called outside of regions, or in one with
    `enabled=False`. In its own region it runs as it is, so frozen bases train adapters inside the
    training loop's region. What is called past the model, as `model.encoder(x)`, `model.forward(x)`
    or a module that another model shares, needs the region around. It goes with deepcopy, pickle
    and torch.compile. Its state_dict holds the low tensors; loading a float32 checkpoint rounds it
    as the cast does.

    What holds for the examples holds for calls that take the same branches; give one for each.
    Nothing is checked later: on another branch a weight may be read in the low format silently, and
    a stored weight that is made to require gradients is trained in the low format.
    Freeze in the mode, train or eval, in which the model will run. With gradients enabled the
    examples are run with and without them, else only without. Buffers, attributes, and the random
    numbers of torch, Python and NumPy are put back after each run; what else a call changes is not.
    Freeze a model that has all the modules that use its weights, before it is compiled.

    Args:
        model: any module; it is changed in place, and its parameters stay the same objects.
        example_inputs: the arguments of one call, a tuple, or a list of such tuples.
        kwargs: keyword arguments of every call.
        device_type: whose weights; None for that of the model's tensors, if it is one.
        dtype: the low format; None for that of the region around, or the device's default.
        policy: as `autocast` takes it.
        drop: False keeps the float32 originals for `remove()`; True lets them go, so that the
            memory of what is stored low halves.

    Returns:
        A handle, not the model.

    Raises:
        TypeError: the model is no module or one that cannot be extended; an example is no tuple; a
            weight is a DTensor, quantized, an inference tensor, or of another class of its own.
        PolicyError: no weight can be stored low; the examples do not run the same bit for bit, and
            the message says in which op; or the model, or a part of it, is frozen. The model is as
            it was then.
    """
    examples = _examples(model, example_inputs, kwargs)
    for path, module in model.named_modules():
        _check(module, path)
    kind = _device(model) if device_type is None else device_type
    region = autocast(kind, dtype, policy=policy)
    if not region._enabled:
        raise PolicyError(
            f"freeze(): autocast({kind!r}, {region.fast_dtype}) is disabled, as the warning says, "
            "so nothing would run low. Give dtype=torch.bfloat16 or torch.float16."
        )
    name = type(model).__name__
    place = Place(region, model.__dict__.get(Scoped.KEY), name)
    enabled, low = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    scoped = place.scope is not None
    if enabled and not _is_same(region._ticket, scoped, low, *policy_code.in_force()):
        raise PolicyError(
            f"freeze(): called in a region for {dtype_names.NAMES[low]}, it was asked to freeze "
            f"{name} for {region!r}. Call it outside of regions."
        )
    groups = _groups(model, kind)
    before, grad = freeze_trial.memory(model), torch.is_grad_enabled()
    with torch.inference_mode(False), _uncompiled():
        trial = freeze_trial.Trial(model, examples, kwargs or {}, region, groups, grad)
        _refuse_trained(name, groups)
        trial.watch()
        originals = _stored(model, place, trial)
    for original in originals:
        original.announce()
    cast_cache.drop()
    weight_cast_cache.drop(t for group in groups for t in group.each())
    return Frozen(model, region, groups, before, None if drop else originals)


def _stored(
    model: nn.Module, place: Place, trial: freeze_trial.Trial
) -> list[freeze_trial.Original]:
    """Store low what can be, and have it verified; what was found elsewhere, too, stays."""
    while True:
        chosen = [group for group in trial.groups if not group.why]
        if not chosen:
            _refuse_nothing(place.name, trial.groups)
        originals: list[freeze_trial.Original] = []
        try:
            for group in chosen:
                originals.append(freeze_trial.Original(group.each()))
                originals[-1].store(place.region.fast_dtype)
                group.saved = []
            subclass.extend(model, FrozenModule, place)
            aliased = trial.verify(originals)
        except BaseException:
            _put_back(model, originals)
            raise
        if not aliased:
            return originals
        _put_back(model, originals)
        for at, op in aliased.items():
            chosen[at].stays(f"read by {op} through a tensor that is no parameter or buffer")


def _put_back(model: nn.Module, originals: Iterable[freeze_trial.Original]) -> None:
    for original in originals:
        original.put_back()
    subclass.restore(model, FrozenModule)


def _examples(model: Any, inputs: Any, kwargs: Any) -> list[tuple[Any, ...]]:
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


def _check(module: nn.Module, path: str) -> None:
    """Refuse a module that cannot be frozen, or has tensors that cannot."""
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
    """Of what kind a tensor is that freeze() cannot store; "" for a plain one."""
    if t.is_quantized:
        return "which is quantized"
    if t.is_meta:
        return "which is on meta, without values"
    if not modes.is_plain(t):
        return f"whose class, {type(t).__name__}, changes what ops do"
    if t.is_inference():
        return "an inference tensor, made under torch.inference_mode()"
    return "a part of FSDP's flat parameter" if distributed.in_fsdp1(t) else ""


def _device(model: nn.Module) -> str:
    found = {t.device.type for t in freeze_trial.names(model).values() if t.is_floating_point()}
    if len(found) != 1:
        name = type(model).__name__
        if not found:
            raise PolicyError(f"freeze(): {name} has no float tensors to store.")
        raise PolicyError(
            f"freeze(): the float tensors of {name} are on {', '.join(sorted(found))}. "
            "Say which of them to freeze: freeze(..., device_type='cuda')."
        )
    return found.pop()


def _groups(model: nn.Module, device: str) -> list[freeze_usage.Group]:
    """The model's tensors by the memory that they are on, and those reasons that lie in them."""
    pinned = {
        id(t)
        for m in model.modules()
        if Pinned.KEY in m.__dict__
        for _, t in m.__dict__[Pinned.KEY].tensors(m)
    }
    sharing: dict[int, dict[str, torch.Tensor]] = {}
    for name, t in freeze_trial.names(model).items():
        sharing.setdefault(storage.storage_key(t) or id(t), {})[name] = t
    groups = []
    for tensors in sharing.values():
        group = freeze_usage.Group(tensors)
        for name, t in tensors.items():
            if why := "pinned to float32" if id(t) in pinned else _why(t, device):
                alone = all(other is t for other in tensors.values())
                group.stays(why if alone else f"shares memory with {name!r}: {why}")
        groups.append(group)
    return groups


def _why(t: torch.Tensor, device: str) -> str:
    """Why a tensor cannot be stored low, whoever uses it; "" if it can."""
    if t.requires_grad:
        return "requires gradients"
    if t.dtype is not torch.float32:
        return f"is {dtype_names.NAMES[t.dtype]}"
    if t.device.type != device:
        return f"is on {t.device.type}"
    if t.layout is not torch.strided:
        return f"is {str(t.layout).removeprefix('torch.')}"
    return "is empty" if t.numel() == 0 else ""


def _refuse_trained(name: str, groups: Iterable[freeze_usage.Group]) -> None:
    trained = [n for g in groups for n, t in g.tensors.items() if t.requires_grad]
    if trained and all(g.why for g in groups):
        raise PolicyError(
            f"freeze(): all that {name} could store low, {len(trained)} parameters, require "
            "gradients. Those that are trained stay float32; for the others call "
            "requires_grad_(False) first, for all of them model.requires_grad_(False)."
        )


def _refuse_nothing(name: str, groups: Iterable[freeze_usage.Group]) -> NoReturn:
    why = {n: g.why for g in groups for n, t in g.tensors.items() if t.is_floating_point()}
    shown = _shown(why)
    more = f"; and {len(shown) - 6} reasons more" if len(shown) > 6 else ""
    trained = any(t.requires_grad for g in groups for t in g.tensors.values())
    hint = " For weights that are not trained call requires_grad_(False) first." if trained else ""
    raise PolicyError(
        f"freeze(): no weight of {name} can be stored low. {'; '.join(shown[:6])}{more}.{hint}"
    )


def _shown(kept: Mapping[str, str]) -> list[str]:
    """Why tensors stay, a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in kept.items():
        reasons.setdefault(why, []).append(name)
    return [
        f"{', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)}: {why}"
        for why, names in reasons.items()
    ]


def _uncompiled() -> Any:
    """A context in which compiled functions run as they were written."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")
