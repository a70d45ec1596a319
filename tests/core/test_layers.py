"""Who may import whom: every room imports only rooms below it, and no modules import in a circle.

Imports inside functions and for type checkers count. That importing a module runs the `__init__`
of the packages around it does not: `polymp/__init__.py` is the top of the API, not its base.
"""

import ast
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import polymp

# The lowest first. Rooms on one line do not import each other.
LAYERS = """
errors dtypes code_origin text_table
versions
fp8
rules policies
scaling
weights
diagnostics
backends
backends.torch backends.jax
backends.torch.compat backends.jax.compat
backends.torch.snapshot backends.jax.arrays
backends.jax.jaxprs
backends.jax.modules
backends.torch.autocast backends.jax.autocast
backends.torch.modules
backends.torch.weights backends.torch.scaler backends.jax.weights backends.jax.scaler
backends.torch.diagnostics backends.jax.diagnostics
_api torch jax
accelerate keras lightning
transformers
polymp
testing
cli
__main__
"""
LEVELS = {room: at for at, row in enumerate(LAYERS.split("\n")) for room in row.split()}

PACKAGE = Path(polymp.__file__).parent
TOPS = (PACKAGE, PACKAGE / "backends", PACKAGE / "policies")  # the latter two are links

Graph = Mapping[str, set[str]]


@cache
def ours() -> Graph:
    """The modules of polymp that each of them imports, wherever in its text."""
    texts = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path.read_text()
        for top in TOPS
        for path in top.rglob("*.py")
    }
    known = {*texts}
    return {name: set(imported(ast.parse(text), known)) - {name} for name, text in texts.items()}


def imported(tree: ast.AST, known: set[str]) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name modules in full"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else str(node.module) for name in inner]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] == "polymp")


def room(module: str) -> str:
    """The room of a module: the longest name in the table that it begins with."""
    name = module.removeprefix("polymp.")
    while name not in LEVELS:
        assert "." in name, f"{module} has no layer"
        name = name.rpartition(".")[0]
    return name


def upward(imports: Graph) -> set[tuple[str, str]]:
    """The imports that do not lead down, and those from one backend into the other."""
    return {
        (one, other)
        for one, others in imports.items()
        for other in others
        if room(one) != room(other)
        if LEVELS[room(one)] <= LEVELS[room(other)] or {side(one), side(other)} == {"torch", "jax"}
    }


def side(module: str) -> str:
    """Which backend a module is part of, "" if of none."""
    parts = [*room(module).split("."), ""]
    return parts[1] if parts[0] == "backends" else ""


def test_rooms_import_only_what_is_below_them() -> None:
    assert upward(ours()) == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter(ours()).prepare()  # raises CycleError


def test_a_planted_import_is_noticed() -> None:
    text = "def f():\n    from polymp.backends.torch.scaler import grad_scaler"
    for module in ("polymp.scaling", "polymp.backends.jax.scaler.optimizer_step"):
        assert upward({module: set(imported(ast.parse(text), set()))})
    with pytest.raises(CycleError):
        TopologicalSorter({**ours(), "polymp.errors": {"polymp.testing.parity"}}).prepare()


def test_every_package_is_listed() -> None:
    """And its files that are no modules, so that an installed copy has them."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        ".".join(path.parent.relative_to(PACKAGE.parent).parts)
        for top in TOPS
        for path in top.rglob("__init__.py")
    }
    assert sorted(project["packages"]) == sorted(found)
    data = {
        path
        for name, patterns in project["package-data"].items()
        for pattern in patterns
        for path in (PACKAGE.parent / Path(*name.split("."))).glob(pattern)
    }
    others = {p for top in TOPS for p in top.rglob("*") if p.is_file() and p.suffix[:3] != ".py"}
    assert data == others
