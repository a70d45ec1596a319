"""Products in 8 bits in reports, and faults in them: every Inf and NaN is seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from polymp import dtypes
from polymp.torch import GradScaler, autocast, explain, locate
from tests.support.torch.fp8_models import RECIPES, policy

# The scaler is there to find Inf and NaN alone.
pytestmark = pytest.mark.filterwarnings("ignore::polymp.errors.ScalerWarning")

BAD = (float("inf"), -float("inf"), float("nan"))
REASON = "n = 40 is not a multiple of 16"


class Planted(nn.Module):
    """Three layers; an Inf or NaN comes into the middle one as one of its three operands.

    relu behind the layer makes 0 of -Inf: what the product hides, nothing else would show.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(64, 64) for _ in range(3))
        self.operand, self.value = "", 0.0

    def plant(self, t: torch.Tensor) -> torch.Tensor:
        planted = torch.zeros_like(t)
        planted[3, 5] = self.value
        return t + planted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        if self.operand == "activation":
            x = self.plant(x)
        weight = self.middle.weight
        if self.operand == "weight":
            weight = self.plant(weight)
        x = nn.functional.linear(x, weight, self.middle.bias)
        if self.operand == "gradient" and x.requires_grad:
            x.register_hook(self.plant)
        return self.last(torch.relu(x))


def run(operand: str, value: float, recipe: str):
    """A model with a planted operand, and a step that returns the scaler."""
    torch.manual_seed(0)
    model = Planted()
    model.operand, model.value = operand, value
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(32, 64)

    def step() -> GradScaler:
        scaler = GradScaler("cpu", init_scale=8.0)
        with autocast("cpu", torch.bfloat16, policy=policy(recipe)):
            loss = (model(x).float() ** 2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler

    return model, step


@pytest.mark.one_in(4)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("operand", ["activation", "weight", "gradient"])
def test_a_planted_inf_or_nan_is_seen(operand, value, recipe):
    model, step = run(operand, value, recipe)
    before = [p.detach().clone() for p in model.parameters()]
    assert step().get_scale() == 4.0
    assert all(map(torch.equal, model.parameters(), before))
    assert locate(step, model=model) is not None


@pytest.mark.parametrize("value", BAD)
def test_an_infinite_parameter_is_seen(value):
    model, step = run("", 0.0, "tensorwise")
    with torch.no_grad():
        model.middle.weight[3, 5] = value
    before = model.last.weight.detach().clone()
    step()
    assert torch.equal(model.last.weight, before), "the step was skipped"
    fault = locate(step, model=model)
    assert (fault.op, fault.kind) == ("linear", "input")
    assert "middle.weight" in str(fault)


def test_without_a_fault_none_is_seen():
    model, step = run("", 0.0, "rowwise")
    before = model.last.weight.detach().clone()
    assert step().get_scale() == 8.0
    assert not torch.equal(model.last.weight, before)
    assert locate(step, model=model) is None


def test_a_scale_that_is_not_poisoned_hides_an_inf(monkeypatch):
    """The checks above can fail: a scale of 0 makes finite numbers of a -Inf behind a relu."""
    from polymp.backends.torch.autocast import fp8_product

    def bare(verbs, array, recipe, role, axis):
        amax = verbs.amax(array, axis).nan_to_num(posinf=1e30)
        return dtypes.FORMATS[recipe.format_of(role)].max / amax.clamp(1e-12)

    monkeypatch.setattr(fp8_product.fp8, "scale_of", bare)
    model, step = run("weight", -float("inf"), "rowwise")
    before = model.last.weight.detach().clone()
    step()
    assert not torch.equal(model.last.weight, before), "the step was not skipped"


class Odd(nn.Module):
    """Two layers that can run in 8 bits, and one that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.q(x)) + self.k(x))


def report():
    model, x = Odd(), torch.randn(32, 64)
    with explain(model=model) as found:
        with autocast("cpu", policy="fp8"):
            y = model(x)
        y.float().sum().backward()
    return found


def test_explain_has_the_recipe_and_the_reason():
    found = report()
    calls = {(c.module, c.direction): c for c in found.of("linear")}
    for direction in ("forward", "backward"):
        assert (calls["q", direction].recipe, calls["q", direction].fallback) == ("tensorwise", "")
        assert (calls["out", direction].recipe, calls["out", direction].fallback) == ("", REASON)
    assert calls["q", "forward"].run == "float8_e4m3fn"
    assert calls["q", "backward"].run in ("float8_e4m3fn", "float8_e5m2")
    assert calls["out", "forward"].run == "bfloat16"
    assert calls["out", "forward"].rule == "fp8"
    assert found.fallbacks == {REASON: 2}


def test_the_text_and_the_page_of_a_report():
    text, page = " ".join(str(report()).split()), report().to_html()
    assert f"fallbacks: 2 because {REASON}" in text
    assert "fp8, run as lower:" in text
    assert page.count(f"run as lower: {REASON}") == 2
    assert "fp8, tensorwise" in text
    assert "fp8, tensorwise" in page
    plain = explain(Odd(), torch.randn(32, 64), policy="lean", dtype="bf16")
    assert "fallbacks" not in str(plain)


def test_two_recipes_differ_and_so_do_bfloat16_and_8_bits():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 40)), torch.randn(32, 64)
    one, other = (explain(model, x, policy=policy(name)) for name in RECIPES[:2])
    diff = one.diff(other)
    assert [row.changed[0] for row in diff] == ["recipe"]
    assert diff.same, "in the dtypes"
    assert "fp8, tensorwise" in str(diff)
    assert "fp8, rowwise" in str(diff)
    lean = explain(model, x, policy="lean", dtype="bf16").diff(other)
    assert ("rule", "fallback") in [row.changed for row in lean]


def test_a_report_for_a_gpu_has_the_sizes_that_are_too_small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)

    def call(width: int, out: int):
        with FakeTensorMode(), torch.device("cuda"):
            x, w = torch.empty(32, width), torch.empty(out, width)
            return explain(nn.functional.linear, x, w, policy="fp8").of("linear")[0]

    assert call(64, 64).fallback == (
        "k = 64, n = 64 is so small that 8 bits are slower than bfloat16"
    )
    assert call(4096, 4096).recipe == "tensorwise"
