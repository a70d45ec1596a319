"""Fixtures and checks for all tests: require a framework, or skip and say why.

`POLYMP_REQUIRE=torch,jax` turns the skip into a failure, so that a run that is meant to cover a
framework cannot pass by lacking it.
"""

import gc
import importlib
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from threading import get_ident
from types import ModuleType

import pytest
from hypothesis import settings

from tests.support import frameworks
from tests.support.sizes import LONGEST, size

REQUIRED = {name for name in os.environ.get("POLYMP_REQUIRE", "").split(",") if name}
# Random programs take as long as they take, and are the same ones in every run. Of tests that do
# not say how many, `make test` tries 20.
settings.register_profile(
    "ci", deadline=None, derandomize=True, database=None, max_examples=size(20, 60)
)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("POLYMP_HYPOTHESIS", "ci"))

FRAMEWORKS = ("torch", "jax")

# Tests run in as many processes as there are cores. A thread more in each waits, at full load, for
# the others. Set before torch is imported, here and in what a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Likewise: where a test takes two threads, the one that waits leaves the core to the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# In the processes of pytest-xdist this is the width of a terminal; tables in tests have the width
# that they have in a pipe.
os.environ.pop("COLUMNS", None)


def _has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _flags() -> str:
    """XLA's flags for tests: less is compiled, in a third of the time, to the same values.

    Compiling is most of the time of most tests in JAX. LLVM's passes are left out, a program is
    compiled as one piece and not as up to 32 and, as long as XLA has the choice, before jax 0.11,
    without its newer way to make code of a fusion. A test of what XLA makes of a program compiles
    it with `tests.support.jax.hlo.AS_FOR_USERS`.
    """
    flags = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    if not _has("jax") or tuple(map(int, version("jax").split(".")[:2])) >= (0, 11):
        return flags
    return f"{flags} --xla_cpu_use_fusion_emitters=false"


# Set before jax is imported, here and in every process that a test starts; with XLA_FLAGS= in the
# environment, what tests run is compiled as for users.
os.environ.setdefault("XLA_FLAGS", _flags())
# Likewise: where no folder is set jax stores no program, but computes the key of each.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
# Likewise: else inductor compiles a program for each kind of vectors that the processor has, to see
# whether the compiler knows it; a fifth of the first compilation.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Likewise: Keras asks when it is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")


def need(*names: str) -> None:
    """Skip what calls this if a framework is missing; fail it if it is required."""
    for name in names:
        if name in REQUIRED and not _has(name):
            pytest.fail(f"{name} is required by POLYMP_REQUIRE and not installed", pytrace=False)
        if not _has(name):
            raise pytest.skip.Exception(f"{name} is not installed", allow_module_level=True)


def _folder(path: Path) -> str:
    """The folder of tests/ that a test is in."""
    return path.relative_to(Path(__file__).parent).parts[0]


class _Missing(pytest.Module):
    """A test module that cannot be imported: skipped or failed as a whole."""

    def collect(self) -> Iterable[pytest.Item]:
        need(_folder(self.path))
        return []


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> object:
    """Do not import what is in tests/torch and tests/jax where the framework is missing."""
    folder = _folder(module_path)
    if folder in FRAMEWORKS and not _has(folder):
        return _Missing.from_parent(parent, path=module_path)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark `long` all but one in n of the parameters of a test that is marked `one_in(n)`.

    Where the last of several parameters has n values, it is another one of them each time. What
    Hypothesis runs is `sized`: it draws more in `make test-long`.

    Then, if there are several processes, put the files first that take longest: a file runs in one
    process, and what starts last should be short.
    """
    seen = Counter[str]()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None:
            name, (n,) = item.nodeid.partition("[")[0], mark.args
            at = seen[name]
            seen[name] += 1
            if (at + at // n) % n:
                item.add_marker("long")
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("sized")
    if hasattr(config, "workerinput"):
        order = {Path(__file__).parent / name: at for at, name in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import every test without looking for garbage: there is none, and that is a fifth of it.

    Nor is any looked for among what they imported, when the tests run; and less often than Python
    would: tests make many objects that live as long as the process, in the caches of compilers.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


def pytest_report_header() -> str:
    found = ", ".join(f"{name} {version(name)}" for name in FRAMEWORKS if _has(name)) or "none"
    return f"frameworks: {found}; required: {', '.join(sorted(REQUIRED)) or 'none'}"


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Read which ops torch has kernels for, before a test puts some of its own beside them."""
    if "torch" in sys.modules:
        table = importlib.import_module("polymp.backends.torch.autocast.torch_table")
        for device in table.DEVICES:
            table.kernels(device)


@pytest.fixture(scope="module", autouse=True)
def one_mlir_context() -> Iterator[None]:
    """Lower all programs of a file in one context of MLIR.

    jax makes a context for each program, loads all dialects into it and takes it apart: a third of
    the time of tests with many small programs. What it holds are types, attributes and names of
    ops. Other threads have contexts of their own.
    """
    if "jax" not in sys.modules:
        yield
        return
    mlir = importlib.import_module("jax._src.interpreters.mlir")
    new, one, here = mlir.make_ir_context, cache(mlir.make_ir_context), get_ident()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlir, "make_ir_context", lambda: one() if get_ident() == here else new())
        yield


@pytest.fixture(scope="module", autouse=True)
def left_out_of_garbage() -> None:
    """Look no more for garbage among what earlier files have left in the caches of compilers.

    Some tests, and libraries after each training, go through all that is not frozen. Those of
    tracers that leaked thaw what was frozen when the tests were collected.
    """
    gc.collect(1)
    gc.freeze()


@pytest.fixture
def torch() -> ModuleType:
    """The package, and polymp.torch is imported."""
    need("torch")
    importlib.import_module("polymp.torch")
    return importlib.import_module("torch")


@pytest.fixture(params=FRAMEWORKS)
def fw(request: pytest.FixtureRequest) -> ModuleType:
    """The verbs of each framework in turn: see tests/support/frameworks."""
    need(request.param)
    return frameworks.load(request.param)
