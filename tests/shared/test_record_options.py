"""`record` takes the same options in both frameworks, and refuses others in the same words."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest

from polymp.diagnostics.run_record import RecordError
from polymp.errors import PolicyError
from tests.conftest import FRAMEWORKS, need


@pytest.fixture(params=FRAMEWORKS)
def backend(request: pytest.FixtureRequest) -> Any:
    need(request.param)
    return import_module(f"polymp.{request.param}")


def recorded(backend: Any, path: Any = None, **options: Any) -> Any:
    """What `record` makes of a function or a module that does nothing."""
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
