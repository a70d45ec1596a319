"""Docstrings: what users call says its arguments and what it returns; no first line is "What ...".

pydoclint checks the sections that there are, see pyproject.toml. Here is asked that they are there.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import polymp
from tests.conftest import FRAMEWORKS, need

PACKAGE = Path(polymp.__file__).parent
ROOMS = (PACKAGE, PACKAGE / "backends")  # which is a link, and rglob follows none
DOORS = (
    "polymp",
    "polymp.testing",
    "polymp.torch",
    "polymp.torch.cpu",
    "polymp.torch.cuda",
    "polymp.torch.fsdp",
    "polymp.jax",
    "polymp.keras",
    "polymp.lightning",
    "polymp.accelerate",
    "polymp.transformers",
)

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings() -> Iterator[tuple[str, str]]:
    """Where each docstring of the package is, and its text."""
    for path in sorted(path for room in ROOMS for path in room.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(PACKAGE.parent)}:{getattr(node, 'lineno', 1)}", text


def exported(door: ModuleType) -> Iterator[tuple[str, object]]:
    """Whatever a door exports that can be called, with the public methods of its classes."""
    for name in getattr(door, "__all__", None) or vars(door):
        value = getattr(door, name)
        ours = (getattr(value, "__module__", "") or "").startswith("polymp")
        if name.startswith("_") or not callable(value) or not ours:
            continue
        yield name, value
        if inspect.isclass(value):
            yield from ((f"{name}.{m}", f) for m, f in methods(value))


def methods(kind: type) -> Iterator[tuple[str, object]]:
    """Its public methods, but for those that a framework describes and calls: ours override them.

    A docstring of our own says what differs, and then says all.
    """
    theirs = [base for base in kind.__mro__ if not base.__module__.startswith("polymp")]
    for name in dir(kind):
        found = inspect.getattr_static(kind, name)
        found = getattr(found, "__func__", found)  # of class methods and static methods
        ours = (getattr(found, "__module__", "") or "").startswith("polymp")
        hook = any(name in vars(base) for base in theirs) and not found.__doc__
        if not name.startswith("_") and inspect.isfunction(found) and ours and not hook:
            yield name, found


def lacking(value: object) -> list[str]:
    """The sections, and the arguments, that a docstring should have and has not."""
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value):
        init = inspect.getdoc(value.__init__) if "__init__" in vars(value) else ""
        text, attributes = f"{text}\n{init or ''}", True
        if issubclass(value, BaseException):
            return [] if text.strip() else ["docstring"]
    else:
        attributes = False
    signature = inspect.signature(value)  # type: ignore[arg-type]
    asked = [name for name in signature.parameters if name not in ("self", "cls")]
    missing = [name for name in asked if f" {name}:" not in text and not name.startswith("_")]
    section = "Attributes:" if attributes and "Attributes:" in text else "Args:"
    found = [section] if asked and section not in text else []
    returns = signature.return_annotation
    brief = not asked and text.startswith("Return ")  # one line says all
    if not attributes and returns not in (None, "None", "NoReturn") and not brief:
        found += [] if "Returns:" in text or "Yields:" in text else ["Returns:"]
    return [*found, *missing]


def test_no_docstring_begins_with_what() -> None:
    assert [where for where, text in docstrings() if text.startswith("What ")] == []


@pytest.mark.parametrize("door", DOORS)
def test_what_users_call_says_what_it_takes_and_returns(door: str) -> None:
    for framework in FRAMEWORKS if door == "polymp.testing" else door.split(".")[1:2]:
        need(framework)
    found = {name: lacking(value) for name, value in exported(importlib.import_module(door))}
    assert {name: missing for name, missing in found.items() if missing} == {}
    assert found


def test_planted_docstrings_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacking(lambda x: x) == ["Args:", "Returns:", "x"]
    (tmp_path / "planted.py").write_text('def f():\n    """What f does."""')
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path / "polymp")
    monkeypatch.setattr(f"{__name__}.ROOMS", (tmp_path,))
    with pytest.raises(AssertionError, match=r"planted\.py:1"):
        test_no_docstring_begins_with_what()
