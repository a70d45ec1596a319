"""The models, optimizers, schedulers and loss scalers that a training step works with.

They are found where Python finds them when the step runs: among its arguments, in its closure and
defaults, as globals that its code names, as attributes of the object whose method it is, and the
same for the user's functions that it calls.
"""

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from polymp import code_origin
from polymp.backends.torch.scaler.grad_scaler import GradScaler

# Of a container, as many values are looked at: lists of losses may be long, of models not.
_MOST = 64


class TrainingObjects(NamedTuple):
    """The models, optimizers and other objects of a training step, each once.

    Attributes:
        models: modules that are not part of another one here.
        optimizers: those of torch, or derived from torch's class.
        others: schedulers, loss scalers and other objects with `state_dict` and `load_state_dict`.
    """

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    others: list[Any]

    @property
    def scaled(self) -> bool:
        """Whether a loss scaler is among them, which skips steps with bad gradients."""
        scalers = (torch.amp.GradScaler, GradScaler)
        own = [*self.others, *(getattr(it, "scaler", None) for it in self.others)]  # of a plugin
        return any(isinstance(it, scalers) and it.is_enabled() for it in own)


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
