"""Expressions of gradients become names as modules have them, and no two become one."""

from __future__ import annotations

import pytest

from polymp.backends.jax.diagnostics.audit import short_names


@pytest.mark.parametrize(
    ("text", "modules", "name"),
    [
        ("[0][1]['layers'][0]['up']['kernel'].value", ["layers.0.up"], "layers.0.up.kernel"),
        ("params['layers'][2]['w']", [""], "layers.2.w"),
        ("['params']['Dense_0']['bias']", ["LN.Dense_0", "LN"], "LN.Dense_0.bias"),
        ("['params']['Dense_0']['bias']", ["Dense_0"], "Dense_0.bias"),
        (".layers[2].up.bias", ["layers.2.up.eqx.nn.Linear"], "layers.2.up.bias"),
        ("['mlp/~/linear_1']['b']", ["mlp.linear_1"], "mlp.linear_1.b"),
        ("[1]['w']", [], "w"),
        ("args[0]['w']", [], "w"),
        ("w", [], "w"),
        ("[0]", [], "[0]"),
        ("result", [], "result"),
    ],
)
def test_one(text: str, modules: list[str], name: str) -> None:
    assert short_names({7: [text]}, modules) == {7: [name]}


def test_of_a_gradient_that_went_to_a_weight_and_its_moments_the_weight_counts() -> None:
    texts = ["[0]['h']['w']", "[1][0].mu['h']['w']", "[1][0].nu['h']['w']"]
    assert short_names({3: texts}, ["h"]) == {3: ["h.w"]}
    assert short_names({3: texts}, []) == {3: ["h.w"]}


def test_two_parameters_that_get_one_gradient_are_both_named() -> None:
    assert short_names({3: ["[1]['a']", "[1]['b']"]}, []) == {3: ["a", "b"]}


@pytest.mark.parametrize(
    ("texts", "modules", "names"),
    [
        (["[0]['gen']['h']['w']", "[0]['dis']['h']['w']"], ["h"], ["gen.h.w", "dis.h.w"]),
        (["[1][0]['w']", "[1][1]['w']"], [], ["0.w", "1.w"]),
        (["p['w']", "q['w']"], [], ["p.w", "q.w"]),
        (["[0]", "[1]"], [], ["[0]", "[1]"]),
    ],
)
def test_names_that_would_be_alike_keep_more(
    texts: list[str], modules: list[str], names: list[str]
) -> None:
    found = short_names({at: [text] for at, text in enumerate(texts)}, modules)
    assert [name for (name,) in found.values()] == names
