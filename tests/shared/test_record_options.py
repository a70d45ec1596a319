"""`record` takes the same options in both frameworks, and refuses others in the same words."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from polymp.errors import PolicyError, RecordError
from tests.conftest import FRAMEWORKS, need


@pytest.fixture(params=FRAMEWORKS)
def backend(request: pytest.FixtureRequest) -> Any:
    need(request.param)
    return import_module(f"polymp.{request.param}")


def recorded(backend: Any, path: Any = None, **options: Any) -> Any:
    """Return the recorder of a function or a module that does nothing."""
    made: Any = lambda x: x  # noqa: E731
    if backend.__name__ == "polymp.torch":
        import torch

        made = torch.nn.Identity()
    return backend.record(path, made, **options)


def number(said: str, end: str = "") -> str:
    return f"record({said}): write a whole number from {2 if 'probes' in said else 1} on{end}."


NONE, ALL = ", or 0 for none", ", or None for all"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"probes": 1}, ValueError, number("probes=1", NONE)),
        ({"probes": -1}, ValueError, number("probes=-1", NONE)),
        ({"probes": 2.5}, TypeError, number("probes=2.5", NONE)),
        ({"probes": 0.0}, TypeError, number("probes=0.0", NONE)),
        ({"probes": True}, TypeError, number("probes=True", NONE)),
        ({"probes": None}, TypeError, number("probes=None", NONE)),
        ({"every": 0}, ValueError, number("every=0")),
        ({"every": True}, TypeError, number("every=True")),
        ({"every": None}, TypeError, number("every=None")),
        ({"steps": 0}, ValueError, number("steps=0", ALL)),
        ({"steps": "3"}, TypeError, number("steps='3'", ALL)),
        ({"modules": "head"}, TypeError, "record(modules='head'): write a list of patterns of "),
        ({"modules": [3]}, TypeError, "record(modules=[3]): write a list of patterns of module "),
        ({"modules": None}, TypeError, "record(modules=None): write a list of patterns"),
        ({"modules": ["a..b"]}, PolicyError, "record(modules=): 'a..b' is no pattern of module"),
        ({"path": "no/run.rec"}, RecordError, "there is no folder 'no'. Make it first."),
        ({"path": "."}, RecordError, "record('.'): this is a folder. Write the path of a file."),
        ({"path": 3}, TypeError, "record(path, ...): 3 is no path. Write the path of the file"),
    ],
)
def test_other_options_are_refused(
    backend: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        recorded(backend, **options)


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("blocks.0.atn", "did you mean 'blocks.0.attn'"),
        ("head", "paths are, for example, 'blocks', 'blocks.0', 'blocks.0.attn'."),
    ],
)
def test_patterns_match_modules_of_the_model(backend: Any, pattern: str, hint: str) -> None:
    message = re.escape(f"record(modules=): {pattern!r} matches no module of Net: {hint}")
    with pytest.raises(RecordError, match=message):
        nested(backend, [pattern])
    assert [row.module for row in nested(backend, ["*.attn"])] == ["blocks.0.attn"]


def nested(backend: Any, modules: list[str]) -> Any:
    """The rows of a call of a model with one module, blocks.0.attn."""
    if backend.__name__ == "polymp.torch":
        import torch

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = torch.nn.ModuleList([torch.nn.Module()])
                self.blocks[0].attn = torch.nn.Tanh()

            def forward(self, x: Any) -> Any:
                return self.blocks[0].attn(x)

        net = Net()
        recorder = backend.record(None, net, probes=0, modules=modules)
        with recorder:
            net(torch.ones(3))
    else:
        import jax

        def Net(x: Any) -> Any:
            with jax.named_scope("blocks.0.attn"):
                return jax.numpy.tanh(x)

        recorder = backend.record(None, Net, probes=0, modules=modules)
        recorder(jax.numpy.ones(3))
    return [row for row in recorder.record.steps[0].arrays if row.name == "tanh"]


def test_a_model_without_modules_says_so(backend: Any) -> None:
    with pytest.raises(RecordError, match=r"'head' matches no module of .* has no modules with"):
        recorded(backend, modules=["head"])(np.ones(3))


def test_the_other_framework_s_form_is_refused_in_words(backend: Any) -> None:
    recorder = recorded(backend)
    if backend.__name__ == "polymp.torch":
        with pytest.raises(TypeError, match=r"with recorder:` around each step"):
            recorder(np.ones(3))
        return
    for made, name in ((recorder, "record"), (backend.audit(np.tanh), "audit")):
        said = f"polymp.jax.{name} is not a context manager. Write wrapped = polymp.jax.{name}("
        with pytest.raises(TypeError, match=re.escape(said)), made:
            pass


def test_catch_is_no_context_manager(backend: Any) -> None:
    with pytest.raises(TypeError, match=r"Write step = catch\(step\)"), backend.catch(print):
        pass
