"""A pytest plugin that records what tests compute, and compares it with an earlier run.

    pytest -p polymp.testing.records --polymp-record=before
    pytest -p polymp.testing.records --polymp-against=before    # after a change

    def test_step(polymp_record):
        with polymp_record(model):                              # in torch
            step(model)
        params = polymp_record(train_step)(params, x)           # in JAX

A test fails if rounding cannot explain a difference. Without the options nothing is recorded.
"""

import hashlib
import importlib
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from polymp import text_table
from polymp._api import framework_in
from polymp.diagnostics import run_record
from polymp.diagnostics.compare import compare
from polymp.errors import RecordError, brief

_COMPARED, _MISSING = "polymp compared", "polymp has no record of"  # properties of a test's report


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup("polymp")
    text = "record the tests that use the fixture polymp_record in this folder"
    group.addoption("--polymp-record", metavar="DIR", type=Path, help=text)
    text = "compare these tests with the records in this folder, and fail if rounding is no reason"
    group.addoption("--polymp-against", metavar="DIR", type=Path, help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Check the folders, and make the one to record in."""
    to, against = _folders(config)
    if against is not None and not against.is_dir():
        raise pytest.UsageError(f"--polymp-against: there is no folder {str(against)!r}.")
    if to is not None:
        if against is not None and to.resolve() == against.resolve():
            raise pytest.UsageError(
                f"--polymp-record and --polymp-against are one folder, {str(to)!r}, whose records "
                "would be replaced before they are compared. Record in another."
            )
        try:
            to.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise pytest.UsageError(
                f"--polymp-record={str(to)!r}: {error.strerror}. Write the path of a folder."
            ) from None


def _folders(config: pytest.Config) -> tuple[Path | None, Path | None]:
    return config.getoption("--polymp-record"), config.getoption("--polymp-against")


class Recorders:
    """The recorders of a test, by the model or the function that each is of."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._start = item.config.invocation_params.dir  # a test may change into another folder
        self._to, self._against = _folders(item.config)
        self._made: dict[int, tuple[object, str, Any]] = {}  # with the names of their files
        self._compared: set[str] = set()
        self.passed = False  # whether the test did

    def __call__(self, what: Any = None, **options: Any) -> Any:
        """Return the recorder of a model or a function.

        Args:
            what: a torch model, whose recorder is a context manager; None for one without a model;
                or a function, whose recorder is called in its place, as in JAX.
            options: of `polymp.torch.record` or `polymp.jax.record`.

        Returns:
            The recorder, for the same model or function the same one; without the options of the
            plugin, a context manager that does nothing, or the function.
        """
        in_torch = what is None or framework_in(what) == "torch"
        if self._to is None and self._against is None:
            return nullcontext() if in_torch else what
        if id(what) not in self._made:
            name = _file_name(self._item.nodeid, len(self._made))
            backend = importlib.import_module("polymp.torch" if in_torch else "polymp.jax")
            recorder = backend.record(self._to and self._start / self._to / name, what, **options)
            self._made[id(what)] = what, name, recorder
        return self._made[id(what)][2]

    def check(self) -> None:
        """Compare what is recorded, but for what a fixture around the test records still."""
        if texts := [*self._unexplained()]:
            pytest.fail("\n\n".join(texts), pytrace=False)

    def _unexplained(self) -> Iterator[str]:
        """The texts on recorders that no step ran in, and on what rounding does not explain."""
        for what, name, recorder in self._made.values():
            if name in self._compared or getattr(recorder, "recording", False):
                continue
            self._compared.add(name)
            if not recorder.record.steps:
                use = (
                    "use `with polymp_record(model):`; in JAX, call what polymp_record(fn) returns"
                )
                yield f"polymp_record of {brief(what)} recorded no step: {use}."
                continue
            if self._against is None:
                continue
            earlier = self._start / self._against / name
            if not earlier.exists():
                self._item.user_properties.append((_MISSING, self._item.nodeid))
                continue
            self._item.user_properties.append((_COMPARED, name))
            try:
                before = run_record.read(earlier)._replace(name=str(self._against))
                found = compare(before, recorder.record._replace(name="this run"))
            except RecordError as error:
                yield str(error)
            else:
                if not found.explained:
                    yield str(found)


def _file_name(test: str, number: int) -> str:
    """The name of a record: the test's, made safe, and a hash that tells it from all others."""
    safe = re.sub(r"[^\w.]+", "-", test, flags=re.ASCII).strip("-.")[-150:]
    code = hashlib.sha256(f"{test} {number}".encode()).hexdigest()[:8]
    return f"{safe}-{code}.rec"


_KEY = pytest.StashKey[Recorders]()


@pytest.fixture
def polymp_record(request: pytest.FixtureRequest) -> Iterator[Recorders]:
    """Recorders of a test: one for each model or function that it is called with."""
    recorders = request.node.stash[_KEY] = Recorders(request.node)
    yield recorders
    if recorders.passed:
        recorders.check()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Compare what a test recorded once it has passed."""
    yield
    if (recorders := item.stash.get(_KEY, None)) is not None:
        recorders.passed = True
        recorders.check()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say how many records were compared, and which tests had none to compare with."""
    _, against = _folders(config)
    if against is None:
        return
    reports = [r for many in terminalreporter.stats.values() for r in many]
    properties = [
        pair for r in reports if getattr(r, "when", "") == "teardown" for pair in r.user_properties
    ]
    count = sum(key == _COMPARED for key, _ in properties)
    line = f"polymp: {text_table.plural(count, 'record')} compared with {against}"
    terminalreporter.write_line(line)
    for key, test in properties:
        if key == _MISSING:
            terminalreporter.write_line(f"polymp: {against} has no record of {test}: not compared")
