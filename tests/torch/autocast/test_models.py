"""Whole models under polymp and under torch.autocast: the same bits in outputs and gradients."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from tests.support import forks
from tests.support.torch.models import LOW, MODELS, STAGES, WAYS, WITH_GRADIENTS, Outcomes
from tests.support.torch.version_changes import has_lstm

RUN = "import sys; from tests.support.torch import models; models.main(sys.argv[1])"
ENGINES = tuple(stage for stage in STAGES if stage != "torch")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcomes]:
    path = tmp_path_factory.mktemp("models") / "outcomes"
    forks.program(RUN, path)
    return pickle.loads(path.read_bytes())


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [part for part in ours.keys() | theirs.keys() if ours.get(part) != theirs.get(part)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("title", MODELS)
def test_every_bit_is_torch_s(found: dict[str, Outcomes], title: str, engine: str) -> None:
    different = {
        key: parts
        for key, theirs in found["torch"].items()
        if key[0] == title and (parts := differences(found[engine][key], theirs))
    }
    assert different == {}


# Where oneDNN has no such layer in a dtype, polymp must fail in the same words.
MAY_FAIL = {("LSTM", str(low)) for low in (torch.bfloat16, torch.float16) if not has_lstm(low)}


def test_the_models_run(found: dict[str, Outcomes]) -> None:
    theirs = found["torch"]
    assert len(theirs) == len(MODELS) * len(WAYS) * len(LOW)
    assert {(key[0], key[2]) for key, seen in theirs.items() if "error" in seen} == MAY_FAIL
    ran = {key: seen for key, seen in theirs.items() if "error" not in seen}
    low = {title for (title, _, dtype), seen in ran.items() if seen["outputs"][0][0] == dtype}
    low |= {title for title, _ in MAY_FAIL}
    assert low >= {"RNN", "LSTM", "multi-head attention", "attention", "convnet", "sparse tables"}
    gradients = [
        g for (_, way, _), seen in ran.items() if way in WITH_GRADIENTS for g in seen["gradients"]
    ]
    assert None not in gradients
    assert {sparse for _, _, sparse, _ in gradients} == {True, False}


def test_a_difference_is_seen(found: dict[str, Outcomes]) -> None:
    """The two dtypes, taken for each other, differ in every model and way."""
    one, other = (str(low) for low in LOW)
    native = found["native"]
    for title in MODELS:
        for way in WAYS:
            outcomes = native[title, way, one], native[title, way, other]
            if any("error" in seen for seen in outcomes):
                continue
            parts = differences(*outcomes)
            assert "outputs" in parts
            assert ("gradients" in parts) == (way in WITH_GRADIENTS)
