"""Tests that depend on `size` or `LONG` are marked, or no run has their full length."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# `make test-long` runs tests with one of the marks; a test of Hypothesis gets `sized` by itself.
MARKS = {"sized", "long", "given"}


# By module, the names in it that depend on the length of the run.
DEPENDENT: dict[str, frozenset[str]] = {"tests.support.sizes": frozenset({"size", "LONG"})}


def dependent(module: str) -> frozenset[str]:
    """The names in a module of tests that depend on the length of the run; none of others."""
    if module not in DEPENDENT:
        DEPENDENT[module] = frozenset()  # for modules that import in a circle
        path = ROOT / f"{module.replace('.', '/')}.py"
        if module.startswith("tests.") and path.exists():
            DEPENDENT[module] = frozenset(dependents(ast.parse(path.read_text()).body))
    return DEPENDENT[module]


def dependents(body: list[ast.stmt]) -> set[str]:
    """The names at the top of a module that depend on `size` or `LONG`, through others as well."""
    found = set(imported(body))
    reads = [(defined(part), used(part) | fixtures(part)) for part in body]
    while more := {name for names, read in reads if found & read for name in names} - found:
        found |= more
    return found


def imported(body: list[ast.stmt]) -> Iterator[str]:
    """The imports of a module that depend on the length: a name, or "module.name" of a module."""
    for node in (node for part in body for node in ast.walk(part)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests"):
            for name in node.names:
                here = name.asname or name.name
                if name.name in dependent(node.module):
                    yield here
                yield from (f"{here}.{of}" for of in dependent(f"{node.module}.{name.name}"))


def used(part: ast.AST) -> set[str]:
    """The names that a part of a module reads from the module."""
    match part:
        case ast.Name(id=name, ctx=ast.Load()):
            return {name}
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            return {name, f"{name}.{attribute}"}
    found = set[str]().union(*map(used, ast.iter_child_nodes(part)))
    return found - arguments(part)


def arguments(part: ast.AST) -> set[str]:
    """The names of the arguments of a function; of tests and fixtures, they are fixtures."""
    if not isinstance(part, ast.FunctionDef | ast.Lambda):
        return set()
    return {node.arg for node in ast.walk(part.args) if isinstance(node, ast.arg)}


def fixtures(part: ast.stmt) -> set[str]:
    """The names of the fixtures that a test or a fixture asks for."""
    if not isinstance(part, ast.FunctionDef):
        return set()
    decorators = "".join(map(ast.dump, part.decorator_list))
    asks = part.name.startswith("test_") or "fixture" in decorators
    return arguments(part) if asks else set()


def defined(part: ast.stmt) -> set[str]:
    """The names that a statement at the top of a module defines, but for imports."""
    if isinstance(part, ast.FunctionDef | ast.ClassDef):
        return {part.name}
    targets: Iterable[ast.expr] = ()
    if isinstance(part, ast.Assign):
        targets = part.targets
    if isinstance(part, ast.AnnAssign):
        targets = [part.target]
    nodes = (node for target in targets for node in ast.walk(target))
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def marks(parts: Iterable[ast.expr]) -> set[str]:
    """The names of marks, and of other functions, in decorators."""
    found = set()
    for node in (node for part in parts for node in ast.walk(part)):
        match node:
            case ast.Attribute(value=ast.Attribute(attr="mark"), attr=name) | ast.Name(id=name):
                found.add(name)
    return found


def unmarked(text: str) -> list[str]:
    """The tests in a file that depend on the length of the run and have no mark of it."""
    body = ast.parse(text).body
    found = dependents(body)
    for part in body:
        if isinstance(part, ast.Assign) and defined(part) == {"pytestmark"}:
            if MARKS & marks([part.value]):
                return []
    return [
        part.name
        for part in body
        if isinstance(part, ast.FunctionDef)
        and part.name.startswith("test_")
        and part.name in found
        and not MARKS & marks(part.decorator_list)
    ]


def test_what_depends_on_the_length_of_a_run_is_marked() -> None:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    wrong = {
        f"{path.relative_to(ROOT)}: {name}" for path in files for name in unmarked(path.read_text())
    }
    assert not wrong, f"mark them `sized`, so that `make test-long` runs them: {sorted(wrong)}"
    long = [path for path in files if dependents(ast.parse(path.read_text()).body)]
    assert len(long) > 20, "it finds the files that depend on it"


READS = {
    "its body": "MARK def test_it():\n    assert size(1, 2)",
    "its parameters": "MARK @pytest.mark.parametrize('n', range(size(1, 2)))\ndef test_it(n): ...",
    "a constant": "N: int = size(1, 2)\nM = [N]\nMARK def test_it():\n    assert M",
    "a function": "def half():\n    return LONG\nMARK def test_it():\n    assert half()",
    "a fixture": "@pytest.fixture\ndef x():\n    return LONG\nMARK def test_it(x): ...",
    "an import": "from tests.support.torch.run_ranks import some\nMARK def test_it():\n    some()",
    "a module": "from tests.support.torch import run_ranks as r\nMARK def test_it():\n    r.some()",
}


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize(
    ("mark", "found"),
    [
        ("", ["test_it"]),
        ("@pytest.mark.one_in(3)\n", ["test_it"]),
        ("@pytest.mark.sized\n", []),
        ("@pytest.mark.long\n", []),
        ("@given(st.integers())\n", []),
    ],
)
def test_a_missing_mark_is_noticed(how: str, mark: str, found: list[str]) -> None:
    head = "from tests.support.sizes import LONG, size\n"
    text = READS[how].replace("MARK ", mark)
    assert unmarked(head + text) == found
    assert unmarked(f"{head}pytestmark = pytest.mark.sized\n{text}") == []


def test_what_does_not_depend_on_it_needs_no_mark() -> None:
    text = "from tests.support.sizes import size\nN = size(1, 2)\ndef test_it():\n    assert not 0"
    assert unmarked(text) == []
    assert unmarked("def size(x):\n    return x\ndef test_it():\n    assert size(1)") == []
