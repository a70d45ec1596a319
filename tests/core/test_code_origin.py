"""Whose code a file is, and which line a warning points at."""

import importlib
import inspect
import json
import sysconfig
import warnings
from pathlib import Path

import pytest

import polymp
from polymp import code_origin
from tests.conftest import need

PACKAGE = Path(polymp.__file__).parent


def test_the_users_files_are_not_a_librarys() -> None:
    assert not code_origin.is_library("/home/me/train.py")
    assert not code_origin.is_library(f"{PACKAGE}_of_mine/train.py"), (
        "begins with our folder's name"
    )
    assert not code_origin.is_library(__file__)


@pytest.mark.parametrize("path", ["dtypes.py", "backends/jax/compat.py", "rules/policy.py"])
def test_our_files_are_ours_also_behind_the_link(path: str) -> None:
    for file in (PACKAGE / path, (PACKAGE / path).resolve()):
        assert code_origin.is_ours(str(file))
        assert code_origin.is_library(str(file))


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("<stdin>", False),
        ("<ipython-input-3-1f2>", False),
        ("<python-input-0>", False),
        ("<string>", True),
        ("<frozen importlib._bootstrap>", True),
        (json.__file__, True),
        (f"{sysconfig.get_paths()['stdlib']}/site-packages/mine/train.py", False),
    ],
)
def test_what_has_no_file_and_what_python_brings(name: str, library: bool) -> None:
    assert code_origin.is_library(name) is library


def test_a_library_counts_if_it_is_named() -> None:
    need("jax")
    import jax

    assert code_origin.is_library(jax.__file__, "jax")
    assert not code_origin.is_library(jax.__file__, "flax")
    assert code_origin.folders("no_such_package") == ()


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_scalers_code_is_known_by_its_files(backend: str) -> None:
    """That of every method, wherever the class has it from."""
    need(backend)
    room = {"torch": "op_call", "jax": "explain"}[backend]
    call_site = importlib.import_module(f"polymp.backends.{backend}.diagnostics.{room}")
    scaler = importlib.import_module(f"polymp.backends.{backend}.scaler.grad_scaler").GradScaler
    files = {
        function.__code__.co_filename
        for part in scaler.__mro__
        if part.__module__.startswith("polymp.")
        for function in vars(part).values()
        if hasattr(function, "__code__") and function.__module__.startswith("polymp.")
    }
    assert inspect.getfile(scaler) in files, "what a stack shows is the module's own path"
    assert files - {"<string>"} <= call_site._SCALING, "all but what dataclasses make"


def test_a_warning_points_outside_of_polymp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: of the frames of this file, which is made one of ours, the line that calls it."""
    monkeypatch.setattr(code_origin, "_OURS", (*code_origin._OURS, "/ours/"))
    text = (
        "def warn():\n    warnings.warn('x', stacklevel=code_origin.outside())\n"
        "def call():\n    warn()\n"
    )
    space: dict[str, object] = {"warnings": warnings, "code_origin": code_origin}
    exec(compile(text, "/ours/a.py", "exec"), space)
    call = space["call"]
    assert callable(call)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert [w.filename for w in caught] == [__file__]
