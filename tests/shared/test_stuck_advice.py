"""The advice of a scaler that is stuck: `locate` names the op, and a row for it ends the skips."""

from collections.abc import Callable

import pytest

import polymp
from polymp.errors import ScalerWarning
from tests.conftest import need

ADVICE = (
    "To find the op, call polymp.torch.locate or polymp.jax.locate with the step; to run it in "
    "float32, give it a row: policy.override(fp32=[op])."
)
LARGE = 600.0  # its square is beyond float16


def test_in_torch() -> None:
    need("torch")
    import torch

    from polymp.torch import GradScaler, autocast, locate

    weight = torch.nn.Parameter(torch.full((2, 2), LARGE))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = GradScaler("cpu", stuck_after=3, on_stuck="warn")

    def loss(policy: polymp.Policy) -> torch.Tensor:
        with autocast("cpu", torch.float16, policy=policy):
            return (torch.mm(weight, weight) / 2**20).square().mean()

    def train(policy: polymp.Policy, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            scaler.scale(loss(policy)).backward()
            scaler.step(optimizer)
            scaler.update()

    policy = polymp.policy("amp")
    with pytest.warns(ScalerWarning) as caught:
        train(policy, 4)
    assert str(caught[0].message).endswith(ADVICE)
    fault = locate(lambda: loss(policy))
    assert fault is not None
    assert fault.op == "mm"
    train(policy.override(fp32=[fault.op]), 1)
    assert scaler.report().state.skips == 0


def test_in_jax() -> None:
    need("jax")
    import jax
    import jax.numpy as jnp

    from polymp.jax import autocast, locate

    weight = jnp.full((2, 2), LARGE)

    def loss(policy: polymp.Policy) -> Callable[[jax.Array], jax.Array]:
        @autocast(dtype="float16", policy=policy)
        def call(weight: jax.Array) -> jax.Array:
            return jnp.exp(-(weight @ weight)).mean() + (weight @ weight).mean()

        return call

    policy = polymp.policy("amp")
    fault = locate(loss(policy), weight)
    assert fault is not None
    in_float32 = loss(policy.override(fp32=[fault.op]))
    assert locate(in_float32, weight) is None
    assert jnp.isfinite(jax.grad(in_float32)(weight)).all()
