"""The cost and the gain of `polymp.keras.use` beside Keras' own mixed precision, on JAX.

Two of Keras' documented examples: the convnet for MNIST and the text classifier with a Transformer
block. Models are made from layers, and data on the spot. A run is a number of training steps by
`train_on_batch`, in processor time; what the compiled step needs for its results in between is read
from XLA. Losses of each way stand beside those of float32.

    pip install -e '.[keras]' rich
    python benchmarks/trainers_jax.py                     # about 4 minutes on two cores
    python benchmarks/trainers_jax.py --only text --rounds 4 --out some.json
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np
from pairing import Row, machine, measure, missed, row, save, show, timed

import polymp.keras

BAR = 1.02
STEPS = 2  # of a figure
THEIRS = "Keras' own"
WAYS: dict[str, Any] = {  # the policy of each; None for Keras' own
    "float32": None,
    THEIRS: None,
    "polymp, amp": "amp",
    "polymp, lean": "lean",
}


class Example(NamedTuple):
    """One of Keras' examples.

    Attributes:
        layers: makes the model; called under Keras' dtype policy.
        batch: inputs and labels.
    """

    layers: Callable[[], Any]
    batch: Callable[[], tuple[Any, Any]]


def convnet() -> Any:
    """The model of "Simple MNIST convnet"."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )


def text() -> Any:
    """The model of "Text classification with Transformer", wider."""
    tokens = keras.Input((96,), dtype="int32")
    x = keras.layers.Embedding(2000, 256)(tokens)
    h = keras.layers.MultiHeadAttention(4, 64)(x, x)
    x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(h))
    h = keras.layers.Dense(256)(keras.layers.Dense(1024, activation="relu")(x))
    x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(h))
    x = keras.layers.Dropout(0.1)(keras.layers.GlobalAveragePooling1D()(x))
    x = keras.layers.Dense(20, activation="relu")(x)
    return keras.Model(tokens, keras.layers.Dense(2, activation="softmax", dtype="float32")(x))


def images() -> tuple[Any, Any]:
    made = np.random.default_rng(0)
    return made.random((64, 28, 28, 1), "float32"), made.integers(0, 10, 64)


def sentences() -> tuple[Any, Any]:
    made = np.random.default_rng(0)
    return made.integers(0, 2000, (32, 96)), made.integers(0, 2, 32)


EXAMPLES = {"convnet": Example(convnet, images), "text": Example(text, sentences)}


def model_of(example: Example, way: str, low: str) -> Any:
    """A compiled model that trains in one of the ways."""
    own = f"mixed_{low}" if way == THEIRS else "float32"
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(own)
    try:
        model = example.layers()
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy")
    if WAYS[way] is not None:
        polymp.keras.use(model, policy=WAYS[way], dtype=low)
    return model


def between(model: Any, batch: Any) -> int:
    """Bytes that a compiled train step needs between its arguments and its results."""
    parts = (model.trainable_variables, model.non_trainable_variables)
    parts += (model.optimizer.variables, model.metrics_variables)
    state = tuple([v.value for v in part] for part in parts)
    compiled = jax.jit(model.train_step).lower(state, batch).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def compared(name: str, low: str, rounds: int) -> tuple[list[Row], dict[str, Any]]:
    """The rows of an example in a low dtype, and what else is known of each way."""
    example = EXAMPLES[name]
    x, y = example.batch()
    models = {way: model_of(example, way, low) for way in WAYS}
    losses = {
        way: [float(m.train_on_batch(x, y, return_dict=True)["loss"]) for _ in range(10)]
        for way, m in models.items()
    }
    bytes_ = {
        way: between(m, (jax.numpy.asarray(x), jax.numpy.asarray(y))) for way, m in models.items()
    }

    def steps(model: Any) -> Callable[[], Any]:
        return lambda: [model.train_on_batch(x, y) for _ in range(STEPS)]

    programs = {way: timed(steps(m), clock=time.process_time) for way, m in models.items()}
    times = measure(programs, rounds, warm=1)
    at, rows = f"{name}, {low}", []
    for way in ("polymp, amp", "polymp, lean"):
        bar = BAR if way == "polymp, amp" else None
        rows.append(row(f"{at}: {way} / {THEIRS}", times[THEIRS], times[way], bar))
        rows.append(row(f"{at}: {way} / float32", times["float32"], times[way]))
        kilobytes = [[bytes_[w] / 1024] for w in (THEIRS, way)]
        rows.append(row(f"memory of a step, {at}: {way} / {THEIRS}", *kilobytes, unit="KiB"))
    exact = np.array(losses["float32"])
    off = {
        way: float(np.abs(np.array(found) - exact).max() / np.abs(exact).max())
        for way, found in losses.items()
    }
    return rows, {"what": at, **{way: f"{error:.2g}" for way, error in off.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=EXAMPLES, help="one of the examples")
    # jax.nn.dot_product_attention, which Keras calls, refuses float16 on CPUs.
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help="file of the record")
    args = parser.parse_args()
    rows: list[Row] = []
    off: list[dict[str, Any]] = []
    for name in EXAMPLES if args.only is None else (args.only,):
        found, errors = compared(name, args.dtype, args.rounds)
        rows += found
        off.append(errors)
    title = "Training steps of Keras' examples on JAX"
    show(title, rows)
    for errors in off:
        print(f"losses of 10 steps, off from float32: {errors}")
    print(f"Bars missed: {', '.join(missed(rows)) or 'none'}.")
    record = {
        "machine": machine("jax", "jaxlib", "keras", "numpy"),
        "rounds": args.rounds,
        "tables": {title: rows},
        "lists": {"Largest difference of 10 losses from float32's, by the largest loss": off},
        "notes": ["Times are processor time of all threads, of steps by train_on_batch."],
    }
    save("trainers-jax", jax.default_backend(), record, args.out)
    return int(bool(missed(rows)))


if __name__ == "__main__":
    sys.exit(main())
