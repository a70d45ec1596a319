"""`TrainingState`: a copy of all that a training step changes; and the search for what that is.

A `Snapshot` of parameters, buffers, gradients, optimizers and random numbers; schedulers and loss
scalers are copied by `state_dict` and `load_state_dict`.
"""

import copy
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from polymp import code_origin
from polymp.backends.torch.diagnostics.fault import moments
from polymp.backends.torch.scaler.grad_scaler import GradScaler
from polymp.backends.torch.snapshot import Snapshot
from polymp.diagnostics.bad_step import warn


class TrainingObjects(NamedTuple):
    """The models, optimizers and other objects of a training step, each once."""

    models: list[nn.Module]  # modules that are not part of another one here
    optimizers: list[torch.optim.Optimizer]  # those of torch, or derived from torch's class
    # schedulers, loss scalers and other objects with `state_dict` and `load_state_dict`.
    others: list[Any]

    @property
    def scaled(self) -> bool:
        """Whether a loss scaler is among them, which skips steps with bad gradients."""
        scalers = (torch.amp.GradScaler, GradScaler)
        own = [*self.others, *(getattr(it, "scaler", None) for it in self.others)]  # of a plugin
        return any(isinstance(it, scalers) and it.is_enabled() for it in own)


class TrainingState(Snapshot):
    """A copy of a training's state."""

    def __init__(self, objects: TrainingObjects) -> None:
        tensors = list(named_tensors(objects).values())
        super().__init__(tensors, grads=tensors, optimizers=objects.optimizers, random_numbers=True)
        self._others = [(it, state) for it in objects.others if (state := _state_of(it))]

    def put_back(self) -> None:
        """Give the training the state that it had when this was made."""
        super().put_back()
        for it, state in self._others:
            it.load_state_dict(copy.deepcopy(state))


def _state_of(it: Any) -> Any:
    """Return a copy of an object's `state_dict`; None, with a warning, if it cannot be had."""
    try:
        return copy.deepcopy(it.state_dict())
    except Exception as error:
        warn(
            f"catch leaves out {type(it).__name__}, whose state_dict() raised "
            f"{type(error).__name__}: {error}. It stays as it is when steps are undone."
        )
        return None


def named_tensors(objects: TrainingObjects) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a training by name, each once.

    A parameter that only an optimizer has is called by its place in the optimizer's groups.
    """
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    many = len(objects.models) > 1
    for at, model in enumerate(objects.models):
        prefix = f"{type(model).__name__}{at}." if many else ""
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            if id(t) not in seen:
                seen.add(id(t))
                named[prefix + name] = t
    for it in objects.optimizers:
        for at, group in enumerate(it.param_groups):
            for i, p in enumerate(group["params"]):
                if id(p) not in seen:
                    seen.add(id(p))
                    named[f"param_groups[{at}]['params'][{i}]"] = p
    return named


def weights(objects: TrainingObjects) -> dict[str, torch.Tensor]:
    """Return the parameters that optimizers write, by name."""
    written = {id(p) for it in objects.optimizers for g in it.param_groups for p in g["params"]}
    return {name: t for name, t in named_tensors(objects).items() if id(t) in written}


def states(objects: TrainingObjects) -> dict[str, torch.Tensor]:
    """Return the tensors in the states of optimizers, by name: "exp_avg of 0.weight"."""
    names = {id(t): name for name, t in named_tensors(objects).items()}
    return {
        key: t
        for it in objects.optimizers
        for p in it.state
        for key, t in moments(it, names.get(id(p), "of no model"), p).items()
    }


# The models, optimizers, schedulers and loss scalers that a training step works with.
#
# They are found where Python finds them when the step runs: among its arguments, in its closure
# and defaults, as globals that its code names, as attributes of the object whose method it is,
# and the same for the user's functions that it calls.
#
# Of a container, as many values are looked at: lists of losses may be long, of models not.
_MOST = 64


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
