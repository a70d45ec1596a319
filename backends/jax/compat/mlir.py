"""Programs as MLIR, while they are lowered."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax._src.named_sharding as _named_sharding
import jax._src.pjit as _pjit
import jax._src.sharding_impls as _sharding
import jax.extend.core as core
import jax.interpreters.mlir as mlir


def readers(values: "Iterable[mlir.ir.Value[Any]]") -> list[mlir.ir.Operation]:
    """The ops of an MLIR program that read some of its values. Since jax 0.5.

    `jax.interpreters.mlir.ir` is public, what its classes can do is not documented.
    """
    return [use.owner.operation for value in values for use in value.uses]


def merge_repeated(op: mlir.ir.Operation) -> None:
    """Replace an op of an MLIR program by an earlier one that computes the same, if there is one.

    So are the ops that read its result, as long as they have one operand and one result each. The
    earlier ones are in the same block, which is where ops are put one after the other. Since 0.5.
    """
    todo = [op]
    while todo:
        op = todo.pop()
        if len(op.operands) != 1 or len(op.results) != 1:
            continue
        twins = (one for one in readers(op.operands) if one != op and _is_earlier_twin(one, op))
        if (twin := next(twins, None)) is not None:
            todo += readers(op.results)
            op.results[0].replace_all_uses_with(twin.results[0])
            op.erase()


def _is_earlier_twin(one: mlir.ir.Operation, other: mlir.ir.Operation) -> bool:
    def computed(op: mlir.ir.Operation) -> tuple[object, ...]:
        types = [value.type for value in op.results]
        return op.name, types, {name: op.attributes[name] for name in op.attributes}

    if one.block != other.block or len(one.regions) or not one.is_before_in_block(other):
        return False
    return bool(computed(one) == computed(other))


def lower_in_place(belongs: Callable[[core.ClosedJaxpr], bool]) -> None:
    """Lower some jitted functions into the program that calls them, in place of a call.

    On several devices alone, and none that asks for shardings or layouts of its own, or has
    effects. All others are lowered by jax's own rule, `_pjit_lowering`. Since jax 0.4.
    """

    def rule(
        ctx: mlir.LoweringRuleContext, *args: "mlir.ir.Value[Any]", **params: Any
    ) -> "Sequence[mlir.ir.Value[Any]]":
        jaxpr = params["jaxpr"]
        asked = {x for key in _ASKED for x in params[key]} - {_named_sharding.UNSPECIFIED, None}
        several = _devices(ctx.module_context.axis_context) > 1
        if not several or asked or jaxpr.effects or not belongs(jaxpr):
            own: Sequence[mlir.ir.Value[Any]] = _pjit._pjit_lowering(ctx, *args, **params)
            return own
        stack = ctx.name_stack.extend(f"jit({params['name']})")
        lower = mlir.lower_fun(core.jaxpr_as_fun(jaxpr))
        outs: Sequence[mlir.ir.Value[Any]] = lower(ctx.replace(name_stack=stack), *args)
        return outs

    mlir.register_lowering(_pjit.jit_p, rule, cacheable=False)


_ASKED = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")


def _devices(context: object) -> int:
    """How many devices a program is for, that is lowered in a context."""
    if isinstance(context, _sharding.ShardingContext):
        return context.num_devices
    return context.mesh.size if isinstance(context, _sharding.SPMDAxisContext) else 1
