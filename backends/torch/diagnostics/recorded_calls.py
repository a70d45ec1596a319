"""The calls of a training step since its state was copied, to be repeated from there."""

from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from polymp.backends.torch.diagnostics.step_checks import MeanLoss
from polymp.backends.torch.diagnostics.training_objects import TrainingObjects
from polymp.backends.torch.diagnostics.training_state import Settings, TrainingState, named_tensors


class Call(NamedTuple):
    """A call of the step, to be repeated.

    Attributes:
        args: positional.
        kwargs: by name.
        versions: of the tensors among them, when it was made.
        settings: of the optimizers, such as the learning rate, which code outside may change.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: tuple[int, ...]
    settings: Settings


class StateCopy:
    """The state of the training before a step, and the calls since.

    Args:
        objects: of the training.
        mean: of the losses so far.

    Attributes:
        objects: likewise.
        mean: likewise.
        state: of the objects.
        named: their tensors by name.
        calls: since then.
        left: the versions of the tensors when the last call ended.
    """

    def __init__(self, objects: TrainingObjects, mean: MeanLoss) -> None:
        self.objects: TrainingObjects = objects
        self.mean: MeanLoss = mean
        self.state: TrainingState = TrainingState(objects)
        self.named: dict[str, torch.Tensor] = named_tensors(objects)
        self.calls: list[Call] = []
        self.left: tuple[int, ...] = versions_of(self.named)

    def written(self) -> str:
        """Return the name of a tensor that was written since the last call ended; "" if none."""
        now = versions_of(self.named)
        if now == self.left:
            return ""
        pairs = zip(self.named, self.left, now, strict=True)
        return next(name for name, was, version in pairs if was != version)


def versions_of(given: object) -> tuple[int, ...]:
    """Return the version of each tensor in a tree, which every write to the tensor changes."""
    tensors = (t for t in tree_leaves(given) if isinstance(t, torch.Tensor))
    return tuple(t._version for t in tensors if not t.is_inference())
