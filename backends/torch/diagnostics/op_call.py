"""`OpCall`: a call of an op of the vocabulary, or the backward of one, that a tracer follows."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.compat import flop_count, storage
from polymp.backends.torch.diagnostics.call_site import CallSite
from polymp.backends.torch.diagnostics.op_kinds import OpFacts, dtypes, float_tensors
from polymp.rules.row import Row

# Of most calls: one object for all of them.
_NONE: frozenset[int] = frozenset()
_NOTHING: Mapping[str, int] = MappingProxyType({})


class OpCall:
    """One call of an op, or the backward of one; its arguments are attributes, too.

    Args:
        op: its name in the vocabulary, or torch's own.
        spelling: torch's name, with a prefix.
        place: where it was called.
        direction: "forward", "backward" or "recompute".
        region: the low dtype of the region, "" outside.
        row: the row that decided; None if the policy has none for the op.
        inputs: dtypes of its float inputs before casts; None until they are known.

    Attributes:
        run: dtypes of the float inputs of its first op that computes; for products, of the first
            product.
        outputs: dtypes of its float results.
        casts: the number of casts.
        cast_bytes: bytes read and written by them.
        saved: the number of casts that were not needed, by reason.
        flops: of products, convolutions and attention.
        kept: bytes of float32 kept for backward.
        kept_fp8: bytes of 8-bit tensors kept for backward.
        recipe: of a product in 8 bits, "" of others.
        fallback: why a product with rule fp8 is not in 8 bits.
        backward: the backward of this call, once a part of it has run.
        ops: the number of ops that ran in it, without casts.
        sends: True for parameters and gradients that FSDP2 sends to other ranks.
    """

    def __init__(
        self,
        op: str,
        spelling: str,
        place: CallSite,
        direction: str,
        region: str = "",
        row: Row | None = None,
        inputs: tuple[str, ...] | None = None,
    ) -> None:
        self.op = op
        self.spelling = spelling
        self.place = place
        self.direction = direction
        self.region = region
        self.row = row
        self.inputs = inputs
        self.run: tuple[str, ...] = ()
        self.outputs: tuple[str, ...] = ()
        self.casts: int = 0
        self.cast_bytes: int = 0
        self.saved: Mapping[str, int] = _NOTHING
        self.flops: int = 0
        self.kept = 0
        self.kept_fp8 = 0
        self.recipe = self.fallback = ""
        self.backward: OpCall | None = None
        self.ops: int = 0
        self.sends: bool = False
        self.cast_storages: frozenset[int] = _NONE

    def cast(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Note a cast that was made for it."""
        if self.inputs is None:
            self.inputs, self.outputs = dtypes([source]), dtypes([result])
        self.casts += 1
        self.cast_bytes += storage.stored_bytes(source) + storage.stored_bytes(result)
        self.cast_storages |= {storage.storage_key(source)}

    def computed(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        result: object,
        read: tuple[str, ...],
        made: tuple[str, ...],
    ) -> None:
        """Note an op that is part of it, with the dtypes that the op read and made."""
        if self.inputs is None:
            self.inputs = read
        flops = flop_count.flops(func, args, kwargs, result)
        if flops and not self.flops:
            self.run = read[:1]  # attention's statistics are float32 in any case
        elif not self.run:
            self.run = read or made
        self.flops += flops
        self.outputs = made or self.outputs
        self.ops += 1

    def sent(self, reads: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        """Note tensors that FSDP copies into a buffer; where dtypes differ, that is a cast."""
        sources = [t for t in reads if not any(t is target for target in into)]
        if not sources or not into:
            return
        target = into[0]
        self.inputs, self.run, self.outputs = dtypes(sources), dtypes([target]), dtypes([target])
        for source in sources:
            if source.dtype is not target.dtype:
                self.casts += 1
                self.cast_bytes += source.nbytes + source.numel() * target.element_size()

    def spared(self, given: Any) -> None:
        """Note casts of parameters that were not needed: it ran low, and none was made."""
        low = dtype_names.DTYPES.get(self.region)
        if self.row is None or not self.run or set(self.run) != {self.region}:
            return
        for t in float_tensors(given):
            if t.is_leaf and t.dtype is torch.float32 is not low:
                key = storage.storage_key(t)  # 0 of what torch.func wraps
                if key and key not in self.cast_storages:
                    self.saved = {**self.saved, "cached": self.saved.get("cached", 0) + 1}


class Ran(NamedTuple):
    """An op that runs or has run.

    Attributes:
        op_call: the call that it is part of.
        func: the op.
        facts: of the op.
        args: its arguments.
        kwargs: its arguments by name.
        reads: the float tensors among them.
    """

    op_call: OpCall
    func: torch._ops.OpOverload
    facts: OpFacts
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    reads: list[torch.Tensor]
