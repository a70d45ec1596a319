"""Derivative, batched form and rematerialisation of a product, read off JAX's own primitive.

The transpose and the batched form of JAX's primitive are traced at one dtype, and every product in
the traced program is replaced by one of ours; no rule of JAX's is repeated here.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.extend.core as core
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Literal
from jax.interpreters import ad

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.contraction_forms import Params
from polymp.backends.jax.autocast.op_facts import CONTRACTIONS
from polymp.backends.jax.compat.programs import ClosedProgram, Equation
from polymp.backends.jax.jaxprs import interpreted

# What remat asks of a rule: the forward and the backward equation, whether the result is unknown
# and whether the backward pass has it, and the variables to save.
Halves = tuple[
    core.JaxprEqn | None, core.JaxprEqn | None, Sequence[bool], Sequence[bool], list[core.Var]
]

# Makes a product of ours from JAX's primitive, its operands and its parameters.
Product = Callable[..., jax.Array]


def low(aval: Any, run: str) -> ShapedArray:
    """A type in a low dtype, if it is one of floats."""
    if not jax.numpy.issubdtype(aval.dtype, np.floating):
        return aval  # type: ignore[no-any-return]
    made: ShapedArray = aval.update(dtype=np.dtype(run), weak_type=False)
    return made


def low_type(run: str) -> Callable[[object], ShapedArray]:
    """A function of arrays: the type of one, in a low dtype if it has floats."""
    return lambda x: low(jax.typeof(x), run)


@lru_cache(maxsize=1024)
def transposed(
    of: core.Primitive,
    params: Params,
    run: str,
    moving: int,
    aval: ShapedArray,
    *avals: ShapedArray,
) -> ClosedProgram:
    """The transpose of a plain primitive: a program of the cotangent and the other operands."""

    def program(ct: jax.Array, *rest: jax.Array) -> jax.Array:
        def linear(x: jax.Array) -> jax.Array:
            operands = list(rest)
            operands.insert(moving, x)
            result: jax.Array = of.bind(
                *operands, **dict(params), preferred_element_type=np.dtype(run)
            )
            return result

        out: jax.Array
        (out,) = jax.linear_transpose(linear, aval)(ct)
        return out

    return jax.make_jaxpr(program)(*avals)


@lru_cache(maxsize=1024)
def batched(
    of: core.Primitive, params: Params, run: str, dims: tuple[object, ...], *avals: ShapedArray
) -> ClosedProgram:
    """The plain primitive over a batch, which comes out in front."""

    def program(*operands: jax.Array) -> jax.Array:
        result: jax.Array = of.bind(*operands, **dict(params), preferred_element_type=np.dtype(run))
        return result

    return jax.make_jaxpr(jax.vmap(program, dims))(*avals)


def with_products(
    closed: ClosedProgram, args: Sequence[Any], product: Product, out: str
) -> jax.Array:
    """The result of a program of one dtype, with each product in it replaced by one of ours."""
    eqns = compat.opened(closed)[0].eqns
    turned = set()  # results of products that were made the other way round

    def equation(at: int, eqn: Equation, values: list[jax.Array]) -> Sequence[jax.Array]:
        name = eqn.primitive.name
        if name in CONTRACTIONS:
            params: Mapping[str, object] = eqn.params
            if swapped := _swapped(eqn, eqns[at + 1] if at + 1 < len(eqns) else None):
                params, values = {**params, **swapped}, values[::-1]
                turned.add(eqn.outvars[0])
            return [product(eqn.primitive, *values, params=params)]
        if name == "jit":
            return [with_products(eqn.params["jaxpr"], values, product, out)]
        if name == "convert_element_type" or (name == "transpose" and eqn.invars[0] in turned):
            return values
        return compat.put(eqn.primitive, values, eqn.params)

    (result,) = interpreted(closed, args, equation)
    return lax.convert_element_type(result, out)


def _swapped(eqn: Equation, after: Equation | None) -> dict[str, object] | None:
    """The parameters of a product whose operands change places, if only a transpose follows it.

    The transpose of a product is the product of its operands the other way round. XLA on CPU would
    find that out late, and then has no kernel for what it made.
    """
    if eqn.primitive.name != "dot_general" or after is None:
        return None
    if after.primitive.name != "transpose" or after.invars[0] is not eqn.outvars[0]:
        return None
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    lhs, rhs = (v.aval.ndim for v in eqn.invars)
    batch = len(lb)
    of_lhs, of_rhs = lhs - batch - len(lc), rhs - batch - len(rc)
    turned = (*range(batch), *range(batch + of_lhs, batch + of_lhs + of_rhs))
    order = (*turned, *range(batch, batch + of_lhs))
    if after.params["permutation"] != order:
        return None
    sharding = eqn.params["out_sharding"]
    if sharding is not None:
        spec = [*sharding.spec, *[None] * len(order)]
        spec = sharding.spec.update(partitions=tuple(spec[d] for d in order))
        sharding = sharding.update(spec=spec)
    return {"dimension_numbers": ((rc, lc), (rb, lb)), "out_sharding": sharding}


def tangent(made: jax.Array, parts: Sequence[jax.Array]) -> object:
    """The tangent of a product: the sum of those by its operands."""
    if not parts:
        return ad.instantiate_zeros(ad.Zero(jax.typeof(made)))
    return parts[0] if len(parts) == 1 else ad.add_jaxvals(*parts)


# Makes of an equation of ours the primitive that it stands for, types of its operands, and its
# parameters.
StandsFor = Callable[
    [core.JaxprEqn], tuple[core.Primitive, Sequence[ShapedArray], Mapping[str, object]]
]


def remat_rule(stands_for: StandsFor) -> Callable[..., Halves]:
    """Make a rule by which a rematerialisation policy is asked about JAX's own primitive."""

    def rule(
        saveable: Callable[..., compat.RematAnswer],
        unknown: Sequence[bool],
        kept: Sequence[bool],
        eqn: core.JaxprEqn,
    ) -> Halves:
        """Ask a rematerialisation policy about the primitive that an equation stands for."""
        missing = [
            x
            for x, has in zip(eqn.invars, kept, strict=True)
            if not has and not isinstance(x, Literal)
        ]
        if any(unknown):
            return None, eqn, [True], [True], missing
        of, avals, params = stands_for(eqn)
        preferred = np.dtype(eqn.params["out"])
        case = compat.remat_case(saveable(of, *avals, **params, preferred_element_type=preferred))
        if case == "save":
            return eqn, None, [False], [False], []
        if case == "recompute":
            return eqn, eqn, [False], [True], missing
        there, back = case
        (out,) = eqn.outvars

        def offloaded(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
            made = eqn.primitive.bind(*operands, **eqn.params)
            return made, jax.device_put(made, there)

        forward = jax.make_jaxpr(jax.jit(offloaded))(*(x.aval for x in eqn.invars)).eqns[0]
        saved = forward.outvars[1]
        backward = jax.make_jaxpr(lambda x: jax.device_put(x, back))(saved.aval).eqns[0]
        forward = forward.replace(invars=eqn.invars, outvars=[out, saved])
        return forward, backward.replace(invars=[saved], outvars=[out]), [False], [True], [saved]

    return rule


def eager(primitive: core.Primitive, names: Sequence[str]) -> Callable[..., Any]:
    """Make the function that runs a primitive where nothing is traced: as one kernel."""

    @partial(jax.jit, static_argnames=names)
    def run(*operands: jax.Array, **params: object) -> Any:
        return primitive.bind(*operands, **params)

    def eagerly(*operands: jax.Array, **params: object) -> Any:
        with jax.disable_jit(False):  # it is no part of the user's function
            return run(*operands, **params)

    return eagerly
