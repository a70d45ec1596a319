"""`fp8_policy`: the policy for a function whose first and last products stay in bfloat16."""

from collections.abc import Callable
from typing import Any

from polymp.backends.jax.autocast.api import autocast
from polymp.backends.jax.diagnostics.explain import explain
from polymp.diagnostics.call_record import FORWARD
from polymp.errors import PolicyError
from polymp.rules import policy_files
from polymp.rules.fp8_ends import kept_lower
from polymp.rules.policy import Policy
from polymp.rules.policy_files import Source
from polymp.rules.row import Rule


def fp8_policy(
    fn: Callable[..., object], *args: object, policy: Source = "fp8", **kwargs: Any
) -> Policy:
    """Return a policy with rule fp8 that keeps a model's first and last product in bfloat16.

        policy = fp8_policy(loss, params, batch)
        step = jax.value_and_grad(autocast(loss, policy=policy))

    The first product reads the data, and the last one makes the scores: their rounding errors reach
    the loss more directly than those of the layers between. `fn` is traced, not run. Products are
    found by the paths of their modules, or by `jax.named_scope`. Those in loops are passed over: a
    path in a loop over layers is that of all the layers.

    Args:
        fn: the loss, or the model, without autocast.
        args: of a call of it; arrays, or `jax.ShapeDtypeStruct` in their places.
        policy: with rows of rule fp8.
        kwargs: of the call.

    Returns:
        The policy, with a scope for each of the two modules.

    Raises:
        TypeError: `fn` is not callable.
        PolicyError: the policy has no rows with rule fp8; there are products in fewer than three
            modules; or one of the two is outside of all modules and scopes.
    """
    where = "fp8_policy()"
    if not callable(fn):
        raise TypeError(f"{where} takes a function, not {fn!r:.80}.")
    loaded = policy_files.load(policy)
    if not loaded.fp8:
        kept_lower(loaded, (), where)  # raises
    calls = [  # without products of batches, as in attention, which are no layers
        call
        for call in explain(autocast(fn, policy=loaded), *args, **kwargs).of("linear")
        if call.direction == FORWARD and call.row is not None and call.row.rule is Rule.FP8
    ]
    paths = [call.module for call in calls if call.times == 1]
    if len({call.module for call in calls}) < 3 or not paths:
        found = ", ".join(repr(call.module) for call in calls) or "none"
        name = getattr(fn, "__name__", repr(fn))
        raise PolicyError(
            f"{where}: {name} has products in fewer than three modules ({found}). Without the "
            "first and the last, none is left to run in 8 bits. Write policy='fp8' to run all in 8 "
            "bits; where a function has no modules, jax.named_scope('name') names a part of it."
        )
    return kept_lower(loaded, (paths[0], paths[-1]), where)
