"""Imports the frameworks before a test does, without what they and their dependencies warn of."""

import importlib
import importlib.util
import warnings
from collections.abc import Iterator

import pytest

IMPORTED = {
    "lightning": ("lightning.pytorch.plugins",),
    "accelerate": ("accelerate.utils",),
    "transformers": ("transformers.trainer", "transformers.training_args"),
}

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _name, _modules in IMPORTED.items():
        if importlib.util.find_spec(_name) is not None:
            for _module in _modules:
                importlib.import_module(_module)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps the mode of the first Accelerator for the whole process."""
    from tests.support.torch.trainer_models import reset

    reset()
    yield
    reset()
