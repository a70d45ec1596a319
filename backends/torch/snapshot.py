"""`Snapshot`: a copy of what a piece of a training may change, to go back to.

tensors and gradients     copied, and written back in place
states of optimizers      likewise; what was added since is dropped
modules                   their attributes, and what is in containers among these
random numbers            of torch, of Python, and of numpy's global generator

`TrainingState` is one of all that a training step changes, which `training_objects` finds.
`AsyncCopy` is a copy to the host, for which the host need not wait.
"""

import collections
import copy
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from polymp import code_origin
from polymp.backends.torch.compat import accelerators, distributed
from polymp.backends.torch.compat.dynamo import plain_name

# What is in these, among the attributes of a module, is put back.
_INSIDE = (dict, collections.OrderedDict, list, set)


class Snapshot:
    """A copy of the state of tensors, gradients, optimizers, modules and generators."""

    def __init__(
        self,
        tensors: Iterable[torch.Tensor] = (),
        *,
        grads: Iterable[torch.Tensor] = (),  # the tensors that have them
        optimizers: Iterable[torch.optim.Optimizer] = (),
        settings: Iterable[torch.optim.Optimizer] = (),  # of which the settings alone are kept
        modules: Iterable[nn.Module] = (),  # not their tensors
        random_numbers: bool = False,
    ) -> None:
        self._tensors = [_Values(t) for t in tensors if not is_lazy(t)]  # those have no values yet
        self._grads = [(t, None if t.grad is None else _Values(t.grad)) for t in grads]
        optimizers = [*optimizers]
        self._states = [(it, {p: _all_kept(s) for p, s in it.state.items()}) for it in optimizers]
        self._settings = [
            (it, [_all_kept(_settings(group)) for group in it.param_groups])
            for it in (*optimizers, *settings)
        ]
        self._modules = [(m, dict(vars(m)), _containers(m)) for m in modules]
        self._random = _random_state() if random_numbers else None

    def put_back(self) -> None:
        """Bring everything back to the state that it had when this was made."""
        with torch.no_grad():
            for values in self._tensors:
                values.put_back()
            for t, grad in self._grads:
                t.grad = None if grad is None else grad.put_back()
            for it, states in self._states:
                it.state.clear()
                it.state.update({p: _all_restored(s) for p, s in states.items()})
            for it, groups in self._settings:
                for group, was in zip(it.param_groups, groups, strict=False):
                    group.update(_all_restored(was))
        for module, attributes, containers in self._modules:
            vars(module).clear()
            vars(module).update(attributes)
            for key, inside in containers.items():
                container = attributes[key]
                container.clear()
                container.extend(inside) if isinstance(inside, list) else container.update(inside)
        if self._random is not None:
            _set_random_state(self._random)


def own_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return modules of classes that are not torch's: its layers keep nothing but tensors."""
    # Its wrappers, as DistributedDataParallel, have attributes that go with what is not in Python.
    return [it for it in modules if not f"{type(it).__module__}.".startswith("torch.")]


def _containers(module: nn.Module) -> dict[str, Any]:
    """Copies of the containers among a module's attributes, but for its hooks, which others set."""
    own = {k: v for k, v in vars(module).items() if type(v) in _INSIDE and "_hooks" not in k}
    return {k: copy.copy(v) for k, v in own.items()}


class _Values:
    """A tensor, and a copy of its values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.values = distributed.local(tensor.detach()).clone()

    def put_back(self) -> torch.Tensor:
        local = distributed.local(self.tensor)
        strided = local.layout is torch.strided
        freed = strided and not local.untyped_storage().nbytes()  # by FSDP
        sizes = zip(local.shape, local.stride(), strict=True) if strided else ()
        expanded = any(n > 1 and not step for n, step in sizes)  # into which nothing can write
        if not (freed or expanded) or not self.values.numel():
            with torch.inference_mode() if local.is_inference() else torch.no_grad():
                local.copy_(self.values)
        return self.tensor


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return all of an optimizer's group but its parameters, such as the learning rate."""
    return {name: value for name, value in group.items() if name != "params"}


def _all_kept(values: dict[Any, Any]) -> dict[Any, Any]:
    return {k: _Values(v) if isinstance(v, torch.Tensor) else _copied(v) for k, v in values.items()}


def _all_restored(values: dict[Any, Any]) -> dict[Any, Any]:
    return {k: v.put_back() if isinstance(v, _Values) else _copied(v) for k, v in values.items()}


def _copied(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, type(None))) else copy.deepcopy(value)


def _random_state() -> list[Any]:
    device = _generators()
    numpy = sys.modules.get("numpy")
    states = [torch.get_rng_state(), device and device.get_rng_state_all(), random.getstate()]
    return [*states, None if numpy is None else numpy.random.get_state(legacy=False)]


def _set_random_state(states: list[Any]) -> None:
    cpu, on_device, python, numpy = states
    torch.set_rng_state(cpu)
    if on_device:
        _generators().set_rng_state_all(on_device)
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)


def _generators() -> Any:
    """Return the module of torch with the generators of the accelerator; None if none is used."""
    kind = accelerators.accelerator()
    module: Any = None if kind == "cpu" else torch.get_device_module(kind)
    return module if getattr(module, "is_initialized", bool)() else None


# The models, optimizers, schedulers and loss scalers that a training step works with.
#
# They are found where Python finds them when the step runs: among its arguments, in its closure
# and defaults, as globals that its code names, as attributes of the object whose method it is,
# and the same for the user's functions that it calls.
#
# Of a container, as many values are looked at: lists of losses may be long, of models not.
_MOST = 64


class TrainingObjects(NamedTuple):
    """The models, optimizers and other objects of a training step, each once."""

    models: list[nn.Module]  # modules that are not part of another one here
    optimizers: list[torch.optim.Optimizer]  # those of torch, or derived from torch's class
    # schedulers, loss scalers and other objects with `state_dict` and `load_state_dict`.
    others: list[Any]


def training_objects(step: Callable[..., Any], given: Iterable[object]) -> TrainingObjects:
    """Find what a step works with."""
    modules: dict[int, nn.Module] = {}
    optimizers: dict[int, torch.optim.Optimizer] = {}
    others: dict[int, Any] = {}
    for it in _reachable([step, *given]):
        if isinstance(it, nn.Module):
            modules[id(it)] = it
        elif isinstance(it, torch.optim.Optimizer):
            optimizers[id(it)] = it
        elif _has_state(it):
            others[id(it)] = it
    inner = {id(part) for it in modules.values() for part in it.modules() if part is not it}
    models = [it for key, it in modules.items() if key not in inner]
    return TrainingObjects(models, [*optimizers.values()], [*others.values()])


def _has_state(it: object) -> bool:
    kind = type(it)
    if isinstance(it, DataLoader):  # a place in the data, which is not gone back to
        return False
    return callable(getattr(kind, "state_dict", None)) and callable(
        getattr(kind, "load_state_dict", None)
    )


def _reachable(start: Iterable[object]) -> Iterator[object]:
    """Yield the objects of a training that the user's code can reach from some, each once."""
    seen: set[int] = set()
    waiting = list(start)
    kept = []  # alive as long as their ids are in `seen`
    while waiting:
        it = waiting.pop()
        if id(it) in seen:
            continue
        seen.add(id(it))
        kept.append(it)
        if isinstance(it, (nn.Module, torch.optim.Optimizer)) or _has_state(it):
            yield it
        else:
            waiting += _inside(it)


def _inside(it: object) -> Iterable[object]:
    match it:
        case functools.partial():
            return [it.func, *it.args, *it.keywords.values()]
        case types.MethodType():
            return [it.__self__, it.__func__]
        case types.FunctionType():
            return _of_function(it)
        case dict():
            return [*it.values()][:_MOST]
        case list() | tuple() | set():
            return [*it][:_MOST]
    if isinstance(it, (type, types.ModuleType)) or not hasattr(it, "__dict__"):
        return ()
    file = getattr(sys.modules.get(type(it).__module__), "__file__", None)
    if file is None or code_origin.is_library(file, "torch"):
        return ()
    return [*vars(it).values()][:_MOST]


def _of_function(function: types.FunctionType) -> list[object]:
    original = getattr(function, "_torchdynamo_orig_callable", None) or getattr(
        function, "__wrapped__", None
    )
    if original is not None:
        return [original]
    if code_origin.is_library(function.__code__.co_filename, "torch"):
        return []
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names |= set(code.co_names)
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    found = [value for name, value in function.__globals__.items() if name in names]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return [it for it in found if not isinstance(it, types.ModuleType)] + [
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    ]


class TrainingState(Snapshot):
    """A copy of what a training step changes, and of other tensors."""

    def __init__(self, objects: TrainingObjects, tensors: Iterable[torch.Tensor] = ()) -> None:
        every = named_tensors(objects)
        self.named = {name: t for name, t in every.items() if not is_lazy(t)}
        self._lazy = [t for t in every.values() if is_lazy(t)]
        super().__init__(
            [*self.named.values(), *tensors],
            grads=self.named.values(),
            optimizers=objects.optimizers,
            modules=own_modules(part for model in objects.models for part in model.modules()),
            random_numbers=True,
        )
        self._others: list[tuple[Any, Any]] = []  # schedulers and loss scalers, with their states
        self.left_out: list[str] = []  # objects whose state cannot be had, and why
        for it in objects.others:
            try:
                self._others.append((it, copy.deepcopy(it.state_dict())))
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                self.left_out.append(f"{type(it).__name__}, whose state_dict() raised {why}")

    def has_made(self) -> bool:
        """Return whether lazy parameters got their values after this was made."""
        return not all(map(is_lazy, self._lazy))

    def put_back(self) -> None:
        """Give the training the state that it had when this was made."""
        super().put_back()
        for it, state in self._others:
            it.load_state_dict(copy.deepcopy(state))


def whole_model(objects: TrainingObjects) -> nn.Module | None:
    """Return the model; several as parts of one, by their classes; None without tensors."""
    models = [it for it in objects.models if [*it.parameters(), *it.buffers()]]
    kinds = [type(it).__name__ for it in models]
    if len(models) < 2:
        return models[0] if models else None
    names = [kind if kinds.count(kind) == 1 else f"{kind}{at}" for at, kind in enumerate(kinds)]
    return nn.ModuleDict(dict(zip(names, models, strict=True)))


def named_tensors(objects: TrainingObjects) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a training by name, each once."""
    # A parameter that only an optimizer has is called by its place in the optimizer's groups.
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for model in filter(None, [whole_model(objects)]):
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            named.setdefault(id(t), (plain_name(name), t))
    for it in objects.optimizers:
        for at, group in enumerate(it.param_groups):
            for i, p in enumerate(group["params"]):
                named.setdefault(id(p), (f"param_groups[{at}]['params'][{i}]", p))
    return dict(named.values())


class AsyncCopy:
    """A copy of a tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.Event | None = None
        self._copy = tensor.to("cpu", non_blocking=True)
        if tensor.device.type != "cpu":
            self._event = torch.Event(tensor.device)
            self._event.record()

    def is_ready(self) -> bool:
        """Return whether `values` would not wait; on the CPU it never does."""
        return self._event is None or self._event.query()

    def values(self) -> torch.Tensor:
        """Return the copy. Waits for it."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
