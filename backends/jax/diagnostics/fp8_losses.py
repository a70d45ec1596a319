"""The losses of products, were they in 8 bits, measured in the twin of a program in bfloat16.

A policy that is tried leaves on each product what its operands would be in 8 bits: their roles, and
the axes of their scales. The products of the backward pass have them by the derivative rules of
the contraction in 8 bits.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polymp.backends.jax.autocast.fp8_operands import In8Bits
from polymp.backends.jax.autocast.fp8_quantise import VERBS, product_of
from polymp.backends.jax.compat.programs import Equation
from polymp.backends.jax.diagnostics.events import Event
from polymp.backends.jax.diagnostics.measures import Facts
from polymp.backends.jax.diagnostics.sites import Site
from polymp.diagnostics.call_record import Call
from polymp.diagnostics.fp8_loss import Measurement
from polymp.fp8 import loss


def is_tried(eqn: Equation) -> bool:
    """True for a product that runs low, and that a policy which is tried would run in 8 bits."""
    how: In8Bits | None = eqn.params.get("how")
    return eqn.primitive.name == "polymp_fp8_contraction" and how is not None and how.trial


def loss_of(eqn: Equation, args: Sequence[jax.Array]) -> jax.Array:
    """Measure what a product would lose in 8 bits."""
    how, params = eqn.params["how"], dict(eqn.params["params"])
    summed = params["dimension_numbers"][0]
    operands = [
        loss.Operand(x, part.role, how.axes(at, x.ndim, summed[at]), tuple(summed[at]))
        for at, (x, part) in enumerate(zip(args, how.both, strict=True))
    ]
    product = partial(
        lax.dot_general,
        dimension_numbers=params["dimension_numbers"],
        precision=lax.Precision.HIGHEST,
        preferred_element_type=np.dtype("float32"),
        out_sharding=params["out_sharding"],
    )
    return jnp.stack(loss.product_loss(VERBS, how.rules, operands, product))


def measurements(
    events: Sequence[Event], facts: Sequence[Facts], call_of: Callable[[Site], Call | None]
) -> Iterator[Measurement]:
    """Read what the products of a program would lose."""
    for event, fact in zip(events, facts, strict=True):
        call = call_of(event.site) if is_tried(event.site.eqn) else None
        if call is None or not np.any((fact.peak >= 0) | np.isnan(fact.peak)):  # not taken
            continue
        how: In8Bits = event.site.eqn.params["how"]
        roles = how.lhs.role, how.rhs.role
        for numbers in fact.fp8.reshape(-1, 5).tolist():
            site = call.op, call.module, call.source
            yield Measurement(site, product_of(roles), roles, numbers)
