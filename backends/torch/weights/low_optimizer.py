"""`LowOptimizer`: what is added to the class of an optimizer whose parameters are kept low."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Self

import torch
import torch.nn as nn
from torch.optim import Optimizer

from polymp.backends.torch.compat import dtensor
from polymp.backends.torch.weights import (
    low_compiled,
    low_parameters,
    low_pieces,
    low_state_dict,
    low_step,
)
from polymp.backends.torch.weights.low_parameters import LowWeights
from polymp.weights.summary import summary


class LowOptimizer(Optimizer):
    """An optimizer that keeps its parameters low; made by `low_weights`.

    It is an instance of its own class, too, and is used like one. Added are `low` and `kept`, which
    say what is stored low, and `float32_state_dict` and `load_float32_state_dict` for weights in
    float32.
    """

    _low: LowWeights
    _kind: type[Optimizer]
    _compiled: dict[str, Any]

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError(
            f"{type(self).__name__} is made by polymp.torch.low_weights(optimizer), from an "
            f"optimizer of class {self._kind.__name__}."
        )

    @property
    def low(self) -> list[torch.Tensor]:
        """The parameters that are stored low."""
        return list(self._low.places)

    @property
    def kept(self) -> dict[torch.Tensor, str]:
        """The other parameters, and why each stays as it is."""
        return dict(self._low.kept)

    def __repr__(self) -> str:
        """Show the groups, which parameters are not stored low, and why.

        A parameter without a name, which an optimizer has if it was made of
        `model.named_parameters()`, is shown by its place: "0.3" is number 3 of group 0.
        """
        kept = {}
        for at, group in enumerate(self.param_groups):
            places = [f"{at}.{number}" for number in range(len(group["params"]))]
            names = group.get("param_names", places)
            for name, p in zip(names, group["params"], strict=True):
                if p in self._low.kept:
                    kept[f"{name} {list(p.shape)}"] = self._low.kept[p]
        mode, low = self._low.mode.name, len(self._low.places)
        return f"{super().__repr__()}\n{summary(mode, self._low.dtype, kept, low)}"

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        """Call the class's own; here, so that it is called in a step alone, on float32 values."""
        own: Any = self._kind
        return own._init_group(self, *args, **kwargs)

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        if torch.compiler.is_compiling():
            return low_compiled.step(self, self._low, self._kind, self._compiled, closure)
        with torch.no_grad():
            return low_step.step(self, self._low, self._kind, closure)

    _step.__name__ = "step"
    step: Any = Optimizer.profile_hook_step(_step)
    step.hooked = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and store its parameters low.

        Args:
            param_group: as for any optimizer.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        first = sum(len(g["params"]) for g in self.param_groups[:-1])
        low_parameters.take(self._low, self.state, group, first)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with what stands beside each weight and the mode.

        The remainders of `split` are in it as bfloat16 of the same bits, because NCCL and gloo,
        which gather a state, have no int16.
        """
        return low_state_dict.shown(self._low, self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this method's counterpart, or a plain float32 optimizer, has saved.

        What stands beside a weight belongs to the low weight: load the model's checkpoint as well,
        before or after, and before the next step.

        Args:
            state_dict: of an optimizer in the same mode, or of one with float32 parameters, whose
                weights are then taken as the model has them.

        Raises:
            ValueError: the mode or the parameters that are low are others; nothing was changed.
        """
        saved = low_state_dict.checked(self._low, self, state_dict)
        hooks = self._optimizer_load_state_dict_post_hooks
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        try:
            with low_state_dict.float32_stand_ins(self._low, self):
                super().load_state_dict(saved.plain)
        finally:
            self._optimizer_load_state_dict_post_hooks = hooks
        low_state_dict.load_beside(self._low, self, saved)
        for hook in hooks.values():
            hook(self)

    def complete_state(self) -> None:
        """Put into the state what belongs there before a step; for what copies and restores it."""
        low_parameters.complete(self._low, self)

    def float32_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the state_dict of a model with its low weights as float32.

        A model without low weights loads it, and a copy of this run in any mode goes on from it.

        Args:
            model: whose parameters this optimizer has.

        Returns:
            The state_dict; low weights in it are copies, the others share memory as usual.
        """
        found = model.state_dict()
        for name, p in model.named_parameters(remove_duplicate=False):
            if name in found and p in self._low.places:
                piece = low_pieces.read(self._low, self.state, [p])
                ((_, full),) = low_pieces.values(piece)
                found[name] = full.clone()
        return found

    def load_float32_state_dict(
        self, model: nn.Module, state_dict: Mapping[str, Any], **options: Any
    ) -> Any:
        """Load a float32 state_dict into a model, and into what stands beside its low weights.

        `model.load_state_dict` alone rounds to the low dtype.

        Args:
            model: whose parameters this optimizer has.
            state_dict: with float32 weights.
            options: of `model.load_state_dict`.

        Returns:
            What `model.load_state_dict` returns.
        """
        result = model.load_state_dict(state_dict, **options)
        for name, p in model.named_parameters(remove_duplicate=False):
            if name in state_dict and p in self._low.places:
                full = state_dict[name].to(torch.float32)
                low_parameters.begin(self._low, self.state, p, dtensor.local(full))
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_low": self._low, "_compiled": {}}

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return _rebuilt, (self._kind, self.__getstate__())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made: Self = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        made._low.versions.clear()
        return made


def _rebuilt(kind: Any, state: dict[str, Any]) -> Optimizer:
    made: Any = object.__new__(low_class(kind))
    made.__setstate__(state)
    made._low.versions.clear()
    return made  # type: ignore[no-any-return]


@cache
def low_class(kind: Any) -> type[Optimizer]:
    """Return the class of optimizers of a kind that keep their parameters low."""
    return type(f"Low{kind.__name__}", (LowOptimizer, kind), {"_kind": kind})
