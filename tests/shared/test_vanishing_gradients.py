"""Gradients that vanish in float16: what an audit says of them, in both frameworks."""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import pytest

from polymp import text_table
from polymp.diagnostics.audit import Audit
from tests.conftest import need

WEIGHTS = ((32, 64), (64, 64), (64, 4))


class Audited(NamedTuple):
    """An audit, and by its own gradients the share of zeros in those of the weights."""

    audit: Audit
    zeros: float


@functools.cache
def trained(framework: str, dtype: str, factor: float) -> Audited:
    """A step of three layers in which the loss is multiplied by a factor before the backward."""
    need(framework)
    random = np.random.default_rng(0)
    weights = [random.standard_normal(s).astype(np.float32) / s[0] ** 0.5 for s in WEIGHTS]
    x = random.standard_normal((16, 32)).astype(np.float32)
    if framework == "torch":
        import torch

        import polymp.torch

        ws = [torch.tensor(w, requires_grad=True) for w in weights]
        with polymp.torch.audit() as audit:
            with polymp.torch.autocast("cpu", getattr(torch, dtype)):
                a, b, c = ws
                y = (torch.tensor(x) @ a).tanh() @ b @ c
                loss = torch.nn.functional.cross_entropy(y, torch.arange(16) % 4)
            (loss * factor).backward()
        gradients = [w.grad.numpy() for w in ws if w.grad is not None]
    else:
        import jax
        import optax

        import polymp.jax

        @functools.partial(polymp.jax.autocast, dtype=dtype)
        def loss(ws: Any, x: Any) -> Any:
            a, b, c = ws
            y = jax.numpy.tanh(x @ a) @ b @ c
            return optax.losses.softmax_cross_entropy_with_integer_labels(
                y, np.arange(16) % 4
            ).mean()

        audited = polymp.jax.audit(jax.grad(lambda ws, x: loss(ws, x) * factor))
        gradients, audit = list(map(np.asarray, audited(weights, x))), audited.audit
    return Audited(audit, float(np.mean([(g == 0).mean() for g in gradients])))


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("factor", [1e-6, 3e-8, 1e-10])
def test_gradients_that_float16_made_zero_are_no_healthy_ones(
    framework: str, factor: float
) -> None:
    low = trained(framework, "float16", factor)
    assert low.zeros > 0.3, "nothing vanished"
    lost = low.audit.lost_gradients()
    assert lost > 0.5
    said = text_table.share(lost)
    assert f"gradients that become zero in float16: {said} unscaled" in str(low.audit)
    suggestion = low.audit.suggest()
    assert suggestion.reasons[0].startswith(f"gradients: {said} of the values")
    assert suggestion.init_scale is not None, suggestion
    tried = trained(framework, "float16", factor * suggestion.init_scale)
    assert tried.zeros < 0.01
    assert tried.audit.fault is None


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_what_would_vanish_in_float16_is_said_where_it_did_not_run(framework: str) -> None:
    audit = trained(framework, "bfloat16", 1e-6).audit
    suggestion = audit.suggest()
    assert not suggestion, "a run in bfloat16 needs nothing"
    said, fits = text_table.share(audit.lost_gradients()), audit.fitting_scale()
    assert suggestion.reasons[0].startswith(f"gradients: {said} of the values")
    assert fits is not None
    assert f"a loss scale of 2.0**{math.log2(fits):g};" in suggestion.reasons[0]
    assert not trained(framework, "bfloat16", 1.0).audit.suggest().reasons
