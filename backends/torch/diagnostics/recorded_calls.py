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
        losses: of the call, on their devices.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: tuple[int, ...]
    settings: Settings
    losses: list[torch.Tensor]


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
        left: `versions` when the last call ended.
    """

    def __init__(self, objects: TrainingObjects, mean: MeanLoss) -> None:
        self.objects: TrainingObjects = objects
        self.mean: MeanLoss = mean
        self.state: TrainingState = TrainingState(objects)
        self.named: dict[str, torch.Tensor] = named_tensors(objects)
        self.calls: list[Call] = []
        self._versioned = [t for t in self.named.values() if not t.is_inference()]
        self.left: list[int] = self.versions()

    def versions(self) -> list[int]:
        """Return the versions of the tensors, which every write to a tensor changes."""
        return [t._version for t in self._versioned]

    def written(self) -> str:
        """Return the name of a tensor that was written since the last call ended; "" if none."""
        now = self.versions()
        if now == self.left:
            return ""
        triples = zip(self._versioned, self.left, now, strict=True)
        written = next(t for t, was, version in triples if was != version)
        return next(name for name, t in self.named.items() if t is written)


def versions_of(given: object) -> tuple[int, ...]:
    """Return the version of each tensor in a tree, which every write to the tensor changes."""
    tensors = (t for t in tree_leaves(given) if isinstance(t, torch.Tensor))
    return tuple(t._version for t in tensors if not t.is_inference())
