"""The programs in benchmarks/, as modules, for tests of what they measure."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from tests.support.blocks import ROOT


def benchmark(name: str) -> ModuleType:
    """The program benchmarks/`name`.py, imported from where it finds those beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module(name)
