"""The rows of benchmarks/fp8.py, and that a row can miss its bar."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.conftest import need
from tests.support.benchmarks import benchmark


@pytest.fixture(scope="module")
def fp8() -> ModuleType:
    for package in ("torch", "jax", "rich"):
        need(package)
    return benchmark("fp8")


def test_rows_of_a_try_out(fp8: ModuleType) -> None:
    recipes = list(fp8.RECIPES)
    small = fp8.SMALL._replace(layers=fp8.SMALL.layers[:1])
    for framework in ("torch", "JAX"):
        rows = list(fp8.layers(framework, small, 1))
        pairs = [*((recipe, "bfloat16") for recipe in recipes), ("bfloat16", "float32")]
        assert [r.what for r in rows] == [f"{framework}, 32 x 32 x 32: {a} / {b}" for a, b in pairs]
        assert all(r.ratio > 0 and r.bar is None for r in rows)
    saved = {r.what: r for r in fp8.saved("torch", small)}
    bars = {what: r.bar for what, r in saved.items()}
    assert bars == {
        f"torch, {model}: {recipe} / bfloat16": None if recipe == "rowwise_gw_hp" else 0.65
        for model in ("block", "example")
        for recipe in recipes
    }
    missed = fp8.missed(saved.values())
    assert missed == list(fp8.REASONS), "each has a reason"


def test_the_rules_that_torchao_has_are_named(fp8: ModuleType) -> None:
    config = pytest.importorskip("torchao.float8").Float8LinearConfig
    for name in fp8.TORCHAO.values():
        assert config.from_recipe_name(name)
