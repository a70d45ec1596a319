"""Programs as MLIR, while they are lowered."""

from collections.abc import Iterable
from typing import Any


def readers(values: Iterable[Any]) -> list[Any]:
    """The ops of an MLIR program that read some of its values. Since jax 0.5.

    `jax.interpreters.mlir.ir` is public, what its classes can do is not documented.
    """
    return [use.owner.operation for value in values for use in value.uses]


def merge_repeated(op: Any) -> None:
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


def _is_earlier_twin(one: Any, other: Any) -> bool:
    def computed(op: Any) -> Any:
        types = [value.type for value in op.results]
        return op.name, types, {name: op.attributes[name] for name in op.attributes}

    if one.block != other.block or len(one.regions) or not one.is_before_in_block(other):
        return False
    return bool(computed(one) == computed(other))
