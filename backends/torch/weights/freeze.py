"""`freeze`: weights that a region only ever casts to its low dtype are stored in that dtype.

The examples run under autocast, watched by `freeze_usage`, which finds the tensors that cannot be
stored low, and why. The others are stored low, and the examples must then give the same bits.
"""

import contextlib
import copy
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
import torch.nn as nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from polymp import code_origin
from polymp.backends.torch.autocast import dtype_names, region_casts, regions
from polymp.backends.torch.autocast.api import PolicyLike, autocast
from polymp.backends.torch.compat import distributed, dynamo, modes, tree_leaves
from polymp.backends.torch.modules import subclass
from polymp.backends.torch.modules.pin import Pinned
from polymp.backends.torch.modules.scoped import Scoped
from polymp.backends.torch.snapshot import Snapshot
from polymp.backends.torch.weights import freeze_usage
from polymp.backends.torch.weights.freeze_usage import Group, device_of, memory, module_path, names
from polymp.errors import PolicyError, brief


class Frozen(NamedTuple):
    """The result of `freeze`; `print` shows it.

    Attributes:
        model: name of the model's class.
        stored: names of the parameters and buffers that are stored low, every name of a tied one.
        kept: names of the other float ones, and why each stayed as it was.
        dtype: name of the low dtype.
        bytes_before: memory of the model's parameters and buffers before, in bytes.
        bytes_after: their memory now.
    """

    model: str
    stored: tuple[str, ...]
    kept: dict[str, str]
    dtype: str
    bytes_before: int
    bytes_after: int

    def __repr__(self) -> str:
        stored, kept = len(self.stored), len(self.kept)
        return f"Frozen({self.model}, {stored} stored in {self.dtype}, {kept} kept)"

    def __str__(self) -> str:
        lines = [f"{self.model}: {len(self.stored)} tensors stored in {self.dtype}."]
        lines += [f"Bytes of the model: {self.bytes_before:,} before, {self.bytes_after:,} now."]
        if self.kept:
            lines += ["Kept:", *(f"    {why}" for why in _reasons(self.kept))]
        return "\n".join(lines)


def freeze(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | list[tuple[Any, ...]],
    kwargs: dict[str, Any] | None = None,
    *,
    device_type: str | None = None,
    dtype: torch.dtype | str | None = None,
    policy: PolicyLike | None = None,
) -> Frozen:
    """Store the weights of a model in the low dtype if autocast only ever casts them to it.

        frozen = freeze(model.eval().requires_grad_(False), (x,), dtype=torch.bfloat16)
        y = model(x)                         # the bits of autocast, without casts of weights
        print(frozen)                        # what is stored low, what stayed, and why

    The model is called with the examples under `autocast(device_type, dtype, policy=policy)`. A
    float32 parameter or buffer that is not trained, and that is cast to the low dtype at every use,
    is stored in that dtype; tensors that share memory together or not at all. Then outputs,
    gradients and the sequence of ops must be those of the model before, bit for bit. Buffers,
    attributes, and the random state of torch, Python and NumPy are put back after each run. The
    float32 values of what is stored low are gone: keep a copy of the model if you need them.

    Every call of a frozen model enters the region that it is frozen for. Calls that go around the
    model, such as `model.encoder(x)` or `model.forward(x)`, need the region around them. Freeze it
    before it is compiled, and in the mode, train or eval, in which it will run. Its state_dict
    holds the low tensors; loading a float32 checkpoint rounds it as the cast does.

    The comparison holds for calls that take the same branches as an example. Nothing is checked
    later: on another branch a weight may be read in the low dtype without an error, and a stored
    weight that is made to require gradients is trained in it.

    Args:
        model: any module; it is changed in place, and its parameters stay the same objects.
        example_inputs: the arguments of one call, a tuple, or a list of such tuples.
        kwargs: keyword arguments of every call.
        device_type: the device type of the weights; None for the accelerator's if some are there.
        dtype: the low dtype, as a name, an alias such as "bf16", or a dtype; None for that of the
            region around, or the device's default.
        policy: as in `autocast`.

    Returns:
        The names of what is stored low, and of what is not, and why; not the model.

    Raises:
        TypeError: the model is no module or one that cannot be extended; an example is no tuple; a
            weight is a DTensor, quantized, an inference tensor, or of another tensor class.
        PolicyError: no weight can be stored low; the examples do not give the same bits, and the
            message names the op; or the model, or a part of it, is frozen already. The model is not
            changed then.
    """
    examples = _checked_examples(model, example_inputs, kwargs)
    for path, module in model.named_modules():
        _check_module(module, path)
    kind = device_type or device_of(t for t in names(model).values() if t.is_floating_point())
    if dtype is not None and not isinstance(dtype, torch.dtype):
        dtype = dtype_names.of(dtype, "freeze(): dtype")
    with warnings.catch_warnings(record=True, action="always") as told:
        region = autocast(kind, dtype, policy=policy)
    if not region._enabled:
        why = " ".join(str(one.message) for one in told)
        raise PolicyError(f"freeze(): autocast({kind!r}, {region.fast_dtype}) is disabled: {why}")
    name = type(model).__name__
    frozen_for = FrozenFor(region, model.__dict__.get(Scoped.KEY))
    groups = _groups(model, kind)
    before, grad = memory(model), torch.is_grad_enabled()
    as_written: Any = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules:  # compiled functions run as they were written
        as_written = torch.compiler.set_stance("force_eager")
    with torch.inference_mode(False), as_written:
        trial = Trial(model, examples, kwargs or {}, region, groups, grad)
        _refuse_if_nothing(name, groups)
        trial.watch()
        _refuse_if_nothing(name, groups)
        _store(model, frozen_for, trial)
    region_casts.drop()
    low = {n for g in groups if not g.why for n in g.tensors}
    stored = tuple(n for n in names(model) if n in low)
    dtype = dtype_names.NAMES[region.fast_dtype]
    return Frozen(name, stored, _kept(groups), dtype, before, memory(model))


class FrozenFor(NamedTuple):
    """The data of a frozen model."""

    region: autocast  # that it runs in
    scope: Any  # its scope when it was frozen, from `scoped`; None without one


def _store(model: nn.Module, frozen_for: FrozenFor, trial: "Trial") -> None:
    """Store the tensors that can be stored low, and verify."""
    chosen = [group for group in trial.groups if not group.why]
    held = [(t, t.detach()) for group in chosen for t in group.each()]
    try:
        for group in chosen:
            freeze_usage.store(group.each(), frozen_for.region.fast_dtype)
            group.saved = []
        subclass.extend(model, FrozenModule, frozen_for)
        trial.verify()
    except BaseException:
        for t, original in held:
            t.data = original
        subclass.restore(model, FrozenModule)
        raise
    # Autograd refuses graphs made before.
    torch.autograd.graph.increment_version([t for t, _ in held])


# Models and tensors that cannot be frozen, and why; found without a call of the model.


def _checked_examples(model: Any, inputs: Any, kwargs: Any) -> list[tuple[Any, ...]]:
    """Check the example calls of a model; return a tuple of arguments for each."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"freeze() takes a torch.nn.Module and its inputs, not {brief(model)}.")
    listed = inputs if isinstance(inputs, list) else [inputs]
    if not listed or not all(isinstance(one, tuple) for one in listed):
        raise TypeError(
            f"freeze() takes the inputs of {type(model).__name__} as a tuple, such as (x,), or a "
            f"list of tuples, got {brief(inputs)}. For inputs by keyword write "
            "freeze(model, (), kwargs=...)."
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(f"freeze() takes kwargs as a dict, not as {type(kwargs).__name__}.")
    return listed


def _check_module(module: nn.Module, path: str) -> None:
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
            "Freeze the float32 model instead, with all examples."
        )
    for name, t in (*module._parameters.items(), *module._buffers.items()):
        if t is not None and (odd_kind := _odd(t)):
            raise TypeError(
                f"{what} has {name!r}, {odd_kind}. Freeze a model whose parameters and buffers are "
                "plain tensors."
            )


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


def _groups(model: nn.Module, device: str) -> list[Group]:
    """Group the model's tensors by their memory, with reasons to keep them that need no call."""
    pinned = {
        id(t)
        for m in model.modules()
        if Pinned.KEY in m.__dict__
        for _, t in m.__dict__[Pinned.KEY].tensors(m)
    }
    tensors = names(model)
    groups = [Group(together) for together in freeze_usage.sharing(tensors.items())]
    ours, on_storage = {id(t) for t in tensors.values()}, freeze_usage.by_storage(groups)
    for module in model.modules():
        for name, value in vars(module).items():
            if not isinstance(value, torch.Tensor) or id(value) in ours:
                continue
            if group := on_storage.get(modes.storage_key(value)):
                group.stays(f"shares memory with {name!r}, which is no parameter or buffer")
    for group in groups:
        for name, t in group.tensors.items():
            if why := "pinned to float32" if id(t) in pinned else _why(t, device):
                alone = all(other is t for other in group.tensors.values())
                group.stays(why if alone else f"shares memory with {name!r}: {why}")
    return groups


def _why(t: torch.Tensor, device: str) -> str:
    """Return why a tensor cannot be stored low in any use; "" if it can."""
    if t.requires_grad:
        return "requires gradients"
    why = freeze_usage.why_kept(t, torch.float32)
    return why or ("" if t.device.type == device else f"is on {t.device.type}")


def _refuse_if_nothing(name: str, groups: Iterable[Group]) -> None:
    """Raise an error with the reasons if no tensor can be stored low."""
    if not all(group.why for group in groups):
        return
    shown = _reasons(_kept(groups)) or ["it has no float tensors"]
    more = f"; and {len(shown) - 6} more reasons" if len(shown) > 6 else ""
    trained = any(t.requires_grad for g in groups for t in g.tensors.values())
    hint = " For weights that are not trained call requires_grad_(False) first." if trained else ""
    raise PolicyError(
        f"freeze(): no weight of {name} can be stored low. {'; '.join(shown[:6])}{more}.{hint}"
    )


def _kept(groups: Iterable[Group]) -> dict[str, str]:
    """Return the float tensors that stay as they are, by name, and why."""
    named = ((n, t, g.why) for g in groups for n, t in g.tensors.items())
    return {name: why for name, t, why in named if why and t.is_floating_point()}


def _reasons(kept: Mapping[str, str]) -> list[str]:
    """Return the reasons why tensors stay, a line for each."""
    reasons: dict[str, list[str]] = {}
    for name, why in kept.items():
        reasons.setdefault(why, []).append(name)
    lines = []
    for why, tensors in reasons.items():
        more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
        lines.append(f"{', '.join(tensors[:3])}{more}: {why}")
    return lines


# `FrozenModule`: the class of a frozen model, which enters its region when it is called.


class FrozenModule(subclass.Extension):
    """A model's class, once frozen."""

    KEY: ClassVar[str] = "_polymp_freeze"

    def _call_impl(self, *args: object, **kwargs: object) -> Any:
        """Call the module, also by a `__call__` that was bound before. Since torch 1.8."""
        frozen_for = self.__dict__.get(FrozenModule.KEY)
        if frozen_for is None:  # an instance that was made of the class by hand
            return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.__dict__.get(Scoped.KEY) is not frozen_for.scope:
            _refuse_scope(type(self).__name__)
        region = frozen_for.region
        with regions.CompiledRegion(region._ticket) if is_dynamo_compiling() else region:
            return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


@dynamo.at_trace_time
def _refuse_scope(name: str) -> NoReturn:
    raise PolicyError(
        f"{name} has other rules from scoped() than when it was frozen. Freeze the float32 model "
        "with these rules."
    )


# Trial calls of a model, after which its attributes, tensors and random state are put back.


class Trial:
    """The examples, run before and after weights are stored low."""

    def __init__(
        self,
        model: nn.Module,
        examples: Sequence[tuple[Any, ...]],
        kwargs: dict[str, Any],
        region: autocast,
        groups: list[Group],
        grad: bool,
    ) -> None:
        grads = (True, False) if grad else (False,)
        self.groups = groups  # `watch` notes in them why they stay as they are
        self._cases = [(at, grad) for at in range(len(examples)) for grad in grads]
        self._examples = examples
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
            seen = self._uses(self.groups)
            self._run(case, self._region, seen)
            self._run(case, self._region, DtypeReads(self.groups, self._paths))
            self._plain.append((self._run(case, self._region), seen.ops))
        if not any(tree_leaves(results) for results, _ in self._plain):
            raise PolicyError(
                f"freeze(): {self._name} returns no tensor or number for the examples, so that "
                "nothing can be compared. Give examples for which it returns one."
            )
        for group in self.groups:
            if not group.cast:
                group.stays("not used in the examples")

    def verify(self) -> None:
        """Run the examples with the weights stored low, and raise if an op or a bit differs."""
        for case, (results, ops) in zip(self._cases, self._plain, strict=True):
            low = self._uses(Group(group.tensors, "seen already") for group in self.groups)
            error: Exception | None = None
            try:
                self._run(case, watch=low)
                ran_same = freeze_usage.same(self._run(case), results)
            except Exception as raised:
                error, ran_same = raised, False
            difference = freeze_usage.first_difference(low.ops, ops)
            if ran_same and not difference:
                continue
            what = f"freeze(): {self._name}, called with example {case[0]},"
            if error is None and not freeze_usage.same(self._run(case), self._run(case)):
                raise PolicyError(
                    f"{what} gives other bits each time, so that nothing can be compared. Call "
                    "torch.use_deterministic_algorithms(True) before freeze()."
                )
            ours, theirs = difference or (None, None)
            shown = f" It raises {type(error).__name__}: {error}" if error else ""
            low_dtype = dtype_names.NAMES[self._region.fast_dtype]
            raise PolicyError(
                f"{what} does not run with weights in {low_dtype} as under autocast.{shown} "
                f"The first op that differs is {ours or 'none that is seen'}; under autocast it is "
                f"{theirs or 'not there'}. The model was not changed. Freeze the submodules "
                "without this op."
            ) from error

    def _uses(self, groups: Iterable[Group]) -> freeze_usage.Uses:
        return freeze_usage.Uses(groups, self._region.fast_dtype, self._paths)

    def _run(
        self,
        case: tuple[int, bool],
        region: Any = None,
        watch: "freeze_usage.Uses | DtypeReads | None" = None,
    ) -> list[Any]:
        """Return the results of a call and their gradients; nothing is changed."""
        at, grad = case
        args, kwargs = inputs = _copied((self._examples[at], self._kwargs))
        region_casts.drop()  # the next run would use casts of a region around this
        before = Snapshot(modules=self._model.modules(), random_numbers=True)
        try:
            with torch.set_grad_enabled(grad), watch or contextlib.nullcontext():
                with region or contextlib.nullcontext():
                    returned = list(freeze_usage.leaves(self._model(*args, **kwargs)))
                if isinstance(watch, freeze_usage.Uses):
                    watch.returned(returned)
                used = (*self._model.parameters(), *freeze_usage.tensors(inputs))
                read = [t for t in used if t.requires_grad]
                made = [t for t in freeze_usage.tensors(returned) if t.requires_grad]
                if read and made:
                    ones = [torch.ones_like(t) for t in made]
                    returned += torch.autograd.grad(made, read, ones, allow_unused=True)
            return [r.detach().clone() if isinstance(r, torch.Tensor) else r for r in returned]
        finally:
            before.put_back()
            for group in self.groups:
                group.put_back()


def _copied(tree: Any) -> Any:
    """Copy the inputs, for a call that may write them; one tensor in two places stays one."""
    tensors = freeze_usage.tensors(tree)
    memo = {id(t): t.detach().clone().requires_grad_(t.requires_grad) for t in tensors}
    return copy.deepcopy(tree, memo)


class DtypeReads(TorchFunctionMode):
    """Notes tensors whose dtype the program reads: what depends on it cannot be seen."""

    def __init__(self, groups: Iterable[Group], paths: Mapping[int, str]) -> None:
        super().__init__()
        self.groups = freeze_usage.by_storage(groups)
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
        code = sys._getframe(1).f_code
        if tensors and code not in _HARMLESS and not code_origin.is_ours(code.co_filename):
            for group in filter(None, (self.groups.get(modes.storage_key(t)) for t in tensors)):
                group.stays(f"its dtype is read{module_path(self.paths)}")
        return func(*args, **kwargs)


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
