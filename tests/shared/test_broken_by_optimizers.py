"""Training steps that the optimizer breaks: `locate`, `audit` and `catch` say the same of each."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest

import polymp
from polymp.errors import BadStepError
from tests.conftest import need


class Case(NamedTuple):
    """A step whose model is fine: loss and gradients are finite."""

    name: str
    optimizer: str  # "adam" or "rms"; a case of torch alone may have any of torch.optim
    kind: str  # of the fault
    says: str  # what the remedy begins with
    dtype: str = "float32"  # of the weights
    eps: float = 1e-8
    loss: float = 1.0  # how large it is
    healthy: tuple[tuple[str, Any], ...] = ()  # what is other in a step that does not break


ZERO = r"\w+'s eps(=1e-08)? is zero in (torch.)?float16, so that it divides by zero. "
NOTHING = r"\w+'s eps is 0, so that it divides by zero. "
TRIED, UNTRIED = "{1}", "{2}"  # only torch repeats the step
WIDE = "eep the weights in float32 and lower the ops, as polymp.{0}.autocast does."
CASES = (
    Case("an eps that float16 lacks", "adam", "number",
         f"{ZERO}Give it eps=0.0001{TRIED}, or k{WIDE}{UNTRIED}$",
         "float16", healthy=(("eps", 1e-4),)),
    Case("an eps that float16 lacks, and small gradients", "adam", "number",
         f"{ZERO}Give it eps=0.0001{TRIED}, or k{WIDE}{UNTRIED}$",
         "float16", loss=1e-3, healthy=(("eps", 1e-4),)),
    Case("no eps", "adam", "number", f"{NOTHING}Give it eps=1e-08{TRIED}.{UNTRIED}$",
         eps=0.0, healthy=(("eps", 1e-8),)),
    Case("no eps under a root", "rms", "number", f"{NOTHING}Give it eps=1e-08{TRIED}.{UNTRIED}$",
         eps=0.0, healthy=(("eps", 1e-8),)),
    Case("a second moment out of float32", "adam", "operation",
         "Lower the learning rate, or clip the gradients. That was not tried.$",
         loss=1e25, healthy=(("loss", 1.0),)),
    Case("a second moment out of float16", "adam", "overflow", f"K{WIDE} That was not tried.$",
         "float16", 1e-4, 1e4, (("loss", 1.0),)),
)  # fmt: skip


TORCH = {"adam": "Adam", "rms": "RMSprop"}


class InTorch:
    """A step of `torch.optim`."""

    op, name = {"adam": "Adam.step", "rms": "RMSprop.step"}, "torch"
    tried = ", with which this step was tried and is finite", ""

    def __init__(self, case: Case, **options: Any) -> None:
        import torch

        import polymp.torch

        self.tools, self.case = polymp.torch, case
        dtype = getattr(torch, case.dtype)
        self.model = torch.nn.Linear(4, 4, bias=False, dtype=dtype)
        torch.nn.init.ones_(self.model.weight)
        kind = getattr(torch.optim, TORCH.get(case.optimizer, case.optimizer))
        self.optimizer = kind(self.model.parameters(), lr=1e-3, eps=case.eps, **options)
        self.x = torch.ones(2, 4, dtype=dtype)
        self.x[:, 1] = 0  # the gradients of a column are zero

    def step(self) -> Any:
        self.optimizer.zero_grad()
        loss = self.model(self.x).float().square().mean() * self.case.loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def is_finite(self) -> bool:
        """Do the step, and return whether its loss and all that it left are finite."""
        loss = self.step()
        state = [t for s in self.optimizer.state.values() for t in s.values()]
        return all(bool(t.isfinite().all()) for t in (loss, self.model.weight, *state))

    def located(self) -> Any:
        return self.tools.locate(self.step, model=self.model)

    def audited(self, steps: int) -> Any:
        with self.tools.audit(self.model) as audit:
            for _ in range(steps):
                self.step()
        return audit

    def caught(self) -> None:
        step = self.tools.catch(self.step, every=1)
        for _ in range(3):
            step()
        step.check()


class InJax:
    """A step of optax."""

    op, name, tried = {}, "jax", ("", " That was not tried.")

    def __init__(self, case: Case) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        import polymp.jax

        self.tools, self.finite = polymp.jax, lambda x: bool(jnp.isfinite(x).all())
        kind = {"adam": optax.adam, "rms": optax.rmsprop}[case.optimizer]
        optimizer = kind(1e-3, eps=case.eps)
        self.leaves = jax.tree.leaves

        @jax.jit
        def step(w: Any, state: Any, x: Any) -> Any:
            def loss_fn(w: Any) -> Any:
                return ((x @ w).astype("float32") ** 2).mean() * case.loss

            loss, gradients = jax.value_and_grad(loss_fn)(w)
            updates, state = optimizer.update(gradients, state, w)
            return optax.apply_updates(w, updates), state, loss

        w = jnp.ones((4, 4), case.dtype)
        x = jnp.ones((2, 4), case.dtype).at[:, 1].set(0)
        self.step, self.args = step, (w, optimizer.init(w), x)

    def is_finite(self) -> bool:
        return all(map(self.finite, self.leaves(self.step(*self.args))))

    def located(self) -> Any:
        return self.tools.locate(self.step, *self.args)

    def audited(self, steps: int) -> Any:
        audited, (w, state, x) = self.tools.audit(self.step), self.args
        for _ in range(steps):
            w, state, _ = audited(w, state, x)
        return audited.audit

    def caught(self) -> None:
        step, (w, state, x) = self.tools.catch(self.step, every=1), self.args
        for _ in range(3):
            w, state, _ = step(w, state, x)
        step.check()


FRAMEWORKS = {"torch": InTorch, "jax": InJax}
both = pytest.mark.parametrize("framework", FRAMEWORKS)
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.mark.one_in(2)
@both
@each
def test_locate_audit_and_catch_say_the_same(framework: str, case: Case) -> None:
    need(framework)
    kind = FRAMEWORKS[framework]
    assert not kind(case).is_finite()
    fault = kind(case).located()
    assert (fault.direction, fault.kind, fault.run) == ("update", case.kind, case.dtype)
    assert fault.op in (kind.op.get(case.optimizer), "div", "rsqrt", "pow"), str(fault)
    assert fault.source.startswith("test_broken_by_optimizers.py:")
    remedy = case.says.format(kind.name, *kind.tried)
    assert re.match(remedy, fault.remedy), fault.remedy
    assert str(fault).endswith(fault.remedy)

    for steps in (1, 2):  # in the second, the model is given what the first has spoiled
        audit = kind(case).audited(steps)
        assert audit.fault[:8] == fault[:8]
        assert (audit.fault.why, audit.fault.remedy) == (fault.why, fault.remedy)
        suggestion = audit.suggest()
        assert not suggestion
        assert suggestion.reasons[0].endswith(fault.remedy)
        assert str(suggestion).endswith("# No row, dtype or loss scale to change.")
        assert fault.remedy in " ".join(str(audit).split())

    with pytest.raises(BadStepError) as raised:
        kind(case).caught()
    report = raised.value.report
    assert report.step == 0
    assert report.fault[:8] == fault[:8]
    assert report.remedy == fault.remedy
    assert str(report).count(fault.remedy) == 1


@both
@each
def test_with_the_remedy_nothing_is_said(
    framework: str, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    need(framework)
    kind, healthy = FRAMEWORKS[framework], case._replace(**dict(case.healthy))
    assert kind(healthy).is_finite()
    assert kind(healthy).located() is None
    assert "no op made an Inf or NaN of finite numbers" in capsys.readouterr().err
    audit = kind(healthy).audited(2)
    assert audit.fault is None
    assert "tried" not in str(audit.suggest())
    kind(healthy).caught()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "NAdam", "RMSprop", "Adagrad"])
def test_the_eps_of_every_optimizer_of_torch_is_named(torch: Any, name: str, foreach: bool) -> None:
    case = CASES[0]._replace(optimizer=name)
    with pytest.raises(BadStepError) as raised:
        InTorch(case, foreach=foreach).caught()
    assert raised.value.report.step == 0
    assert re.match(f"{name}'s eps=1e-08 is zero in torch.float16", raised.value.report.remedy)
    InTorch(case._replace(eps=1e-4), foreach=foreach).caught()


def test_an_eps_that_would_not_help_is_no_remedy(torch: Any) -> None:
    """One gradient is zero, and the square of another is beyond float16."""
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    model = torch.nn.ParameterList([weight])
    optimizer = torch.optim.Adam([weight], lr=1e-3)
    gradient = torch.tensor([0.0, 6e4], dtype=torch.float16)

    def step() -> None:
        weight.grad = gradient.clone()
        optimizer.step()

    before = weight.detach().clone()
    fault = polymp.torch.locate(step, model=model)
    assert fault.direction == "update"
    assert fault.kind == "operation"
    assert "tried and is finite" not in str(fault)
    assert torch.equal(weight, before)
    assert not optimizer.state
    assert optimizer.param_groups[0]["eps"] == 1e-8
