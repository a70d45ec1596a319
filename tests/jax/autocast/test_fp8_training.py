"""The example trains in 8 bits as in bfloat16; apart, for it takes minutes."""

import jax
import pytest

from tests.jax.autocast.test_fp8_regions import example
from tests.support.jax.fp8_models import policy


@pytest.mark.long
def test_the_example_trains_as_in_bfloat16():
    train_jax, args, text, _ = example()
    own, losses = train_jax.autocast, {}
    for name in ("bfloat16", "rowwise"):
        chosen = None if name == "bfloat16" else policy(name)

        def region(dtype, enabled, chosen=chosen):
            return own(dtype=dtype, enabled=enabled, policy=chosen)

        train_jax.autocast = region
        try:
            run = train_jax.train("bf16", text, args, jax.devices()[0])
        finally:
            train_jax.autocast = own
        losses[name] = run.held_out[-1][1]
    print({name: round(loss, 4) for name, loss in losses.items()}, f"after {args.steps} steps")
    assert losses["rowwise"] == pytest.approx(losses["bfloat16"], rel=0.01)
    assert losses["rowwise"] != losses["bfloat16"]
