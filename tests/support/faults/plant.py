"""The faults: each changes a number, or a value of the data, in a training that was healthy.

Where it can be, what a fault changes in one place is undone in another, so that the training is
the same in exact arithmetic and only the dtype can be what breaks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def _attention(training: Any) -> None:
    """Queries and keys 256 times as large, and scores divided by as much again."""
    head = training.model.attention
    for layer in (head.q, head.k):
        layer.weight.data *= 2.0**8
    head.temperature *= 2.0**-16


def _convolution(training: Any) -> None:
    """Images in other units: the whitening undoes it."""
    images, labels = training.batch
    training.batch = images * 2.0**-16, labels


def _counting(training: Any) -> None:
    """Counts of a shorter time: rates are larger by e**12."""
    training.model.head.bias.data += 12
    training.loss.time = math.exp(-12)


def _recurrent(training: Any) -> None:
    """A weight of the loss that Adam does not see."""
    training.loss.weight = 2.0**-26


def _embedding(training: Any) -> None:
    training.model.unit.eps = 1e-8


def _stream(training: Any) -> None:
    """All that is added to the stream 2**18 times as large: the norms undo it."""
    layers = [training.model.start, *(block.down for block in training.model.blocks)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data *= 2.0**18


IN_TORCH: dict[str, Callable[[Any], None]] = {
    "attention": _attention,
    "convolution": _convolution,
    "counting": _counting,
    "recurrent": _recurrent,
    "embedding": _embedding,
    "stream": _stream,
}


def _regression(training: Any) -> None:
    """One value of the data is no number."""
    x, y = training.batch
    x = x.copy()
    x[5, 2] = math.nan
    training.batch = x, y


def _pooling(training: Any) -> None:
    """One row of the batch is masked as a whole."""
    x, mask, y = training.batch
    mask = mask.copy()
    mask[3] = 0
    training.batch = x, mask, y


def _unit(training: Any) -> None:
    """Data in other units: the norm undoes it."""
    x, y = training.batch
    training.batch = x * 2.0**4, y


def _sparse(training: Any) -> None:
    """The penalty in other units: its weight undoes it."""
    training.loss = training.loss._replace(units=2.0**6)


def _classes(training: Any) -> None:
    """Scores 12 times as large, so that most classes are all but ruled out."""
    training.model.sharpness = 12.0


def _graph(training: Any) -> None:
    """Messages in other units: who receives them divides by as much."""
    training.model.neighbours.units = 2.0**12


IN_JAX: dict[str, Callable[[Any], None]] = {
    "regression": _regression,
    "pooling": _pooling,
    "unit": _unit,
    "sparse": _sparse,
    "classes": _classes,
    "graph": _graph,
}
