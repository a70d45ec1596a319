"""Layers that hand held casts to torch's own kernels: Linear and convolutions.

An op that gets its weights in the low dtype casts none, so that no kernel of ours has to stand on
the autocast key. A layer in a `hold_casts` block reads its casts itself, where no gradient of the
weight is wanted; in all other cases it does what it does without the block.

Compiled code cannot look a cast up. There the casts are attributes of the layer, which dynamo reads
as inputs of the graph. They are brought up to date when a region is entered outside of the graph,
and `held.fresh`, by which the graph is guarded, says that nothing was written since.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import get_autocast_dtype, is_autocast_enabled, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from polymp.backends.torch.autocast import (
    compiled_region,
    held_casts,
    lent_kernels,
    policy_code,
    regions,
)
from polymp.backends.torch.autocast.held_casts import held
from polymp.backends.torch.autocast.run_op import Rulings
from polymp.backends.torch.compat import dynamo, modes
from polymp.backends.torch.compat.modes import are_functions_watched
from polymp.backends.torch.modules import subclass
from polymp.rules import decision_log
from polymp.rules.row import Rule

Lows = tuple[torch.Tensor, torch.Tensor | None]
Known = tuple[held_casts.Weight, held_casts.Held]

policies = policy_code.codes.policies


class Layer:
    """The data of a layer while a block is open.

    Args:
        op: the op that it calls.
        device: the type of its device.

    Attributes:
        op: likewise.
        device: likewise.
        blocks: the number of open blocks.
        dtype: of `weight` and `bias`, for compiled code.
        weight: the cast for compiled code; None if there is none.
        bias: that of the bias.
        of_weight: the cast that was handed over last, for eager code.
        of_bias: that of the bias.
    """

    def __init__(self, op: str, device: str) -> None:
        self.op: str = op
        self.device: str = device
        self.blocks: int = 0
        self.dtype: torch.dtype | None = None
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.of_weight: Known | None = None
        self.of_bias: Known | None = None


class _HeldLayer(subclass.Extension):
    """A layer's class in a block."""

    KEY: ClassVar[str] = "_polymp_held"
    COPIED: ClassVar[bool] = False

    def _lows(self) -> Lows | None:
        """Return weight and bias to call the op with; None for its own."""
        layer: Layer | None = self.__dict__.get(_HeldLayer.KEY)
        if layer is None:
            return None
        params = self._parameters
        weight, bias = params["weight"], params["bias"]
        if weight is None or (weight.requires_grad and is_grad_enabled()):
            return None
        if is_dynamo_compiling():
            return _compiled(layer, weight, bias)
        return _eager(layer, weight, bias)


class HeldLinear(_HeldLayer):
    """The class of a Linear in a block."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name is torch's
        """Compute the layer with the held casts."""
        lows = self._lows()
        if lows is None:
            return super().forward(input)  # type: ignore[no-any-return]
        return F.linear(input, *lows)


def _held_conv(function: Callable[..., torch.Tensor]) -> type[_HeldLayer]:
    class HeldConv(_HeldLayer):
        """The class of a convolution in a block; it pads with zeros."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name is torch's
            """Compute the layer with the held casts."""
            lows = self._lows()
            if lows is None:
                return super().forward(input)  # type: ignore[no-any-return]
            given: Any = self
            geometry = given.stride, given.padding, given.dilation, given.groups
            return function(input, *lows, *geometry)

    return HeldConv


# The layers that are known to read their weights in one op alone, and their classes in a block.
LAYERS: dict[type[nn.Module], type[_HeldLayer]] = {
    nn.Linear: HeldLinear,
    nn.Conv1d: _held_conv(F.conv1d),
    nn.Conv2d: _held_conv(F.conv2d),
    nn.Conv3d: _held_conv(F.conv3d),
}


def _eager(layer: Layer, weight: torch.Tensor, bias: torch.Tensor | None) -> Lows | None:
    """Return the casts; this runs at every use, and a call more shows in its time.

    Other threads use the layer, too, perhaps in another dtype: what is looked up here is not read
    from the layer again.
    """
    device = layer.device
    if (
        not is_autocast_enabled(device)
        or decision_log.current() is not None
        or are_functions_watched()
        or modes.is_transformed()
        or not (len(policies) == 1 or _lowers(layer.op, device))
    ):
        return None
    dtype = get_autocast_dtype(device)
    low = _served(layer.of_weight, weight, dtype)
    if low is None:
        known = layer.of_weight = _looked_up(weight, dtype, device)
        if known is None:
            return None
        low = known[1].low
    if bias is None or (bias.requires_grad and is_grad_enabled()):
        return low, bias
    low_bias = _served(layer.of_bias, bias, dtype)
    if low_bias is None:
        known = layer.of_bias = _looked_up(bias, dtype, device)
        low_bias = bias if known is None else known[1].low
    return low, low_bias


def _served(known: Known | None, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the cast that was served last, if it is that of the tensor as it is now."""
    if known is None or known[1].low.dtype is not dtype:
        return None
    weight, found = known
    if weight.tensor is not t or weight.casts.get((dtype, None)) is not found or weight.checked:
        return None
    if not found.is_of(held_casts._stamp(t)) or modes.is_written_down():
        return None
    weight.served += 1
    return found.low


def _looked_up(t: torch.Tensor, dtype: torch.dtype, device: str) -> Known | None:
    if t.dtype is not torch.float32 or t.device.type != device:
        return None
    weight = held.by_id.get(id(t))  # another thread may let it go
    found = None if weight is None else held_casts.find(t, dtype)
    return None if weight is None or found is None else (weight, found)


def _lowers(op: str, device: str) -> bool:
    """Return whether the policy in force lowers an op."""
    if policy_code.in_force() == policy_code.NONE:
        return True
    row = _rulings.setdefault((op, device), Rulings(op, device)).of(regions.in_force(device)).row
    return row is not None and row.rule is Rule.LOWER


_rulings: dict[tuple[str, str], Rulings] = {}


def _compiled(layer: Layer, weight: torch.Tensor, bias: torch.Tensor | None) -> Lows | None:
    """Return the casts that are attributes of the layer, in code that torch.compile traces."""
    device = layer.device
    if torch.compiler.is_exporting() or not torch.is_autocast_enabled(device):
        return None
    if policy_code.in_force() != policy_code.NONE:
        return None
    _start()
    if not held.fresh or layer.weight is None:
        return None
    if layer.dtype is not torch.get_autocast_dtype(device):
        return None
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        return layer.weight, bias
    return layer.weight, layer.bias


@dynamo.at_trace_time
def _start() -> None:
    """Have regions bring the casts up to date from now on, and do so for the one in force."""
    held.refresh = refresh
    frames = regions.stack.frames
    if frames and not compiled_region.open_regions.leaving and frames[-1][0].enabled:
        region = regions.prepared.by_ticket[regions.ticket(frames[-1][0])]
        refresh(region[1], region[3])


_layers: dict[int, nn.Module] = {}


def refresh(device: str, dtype: torch.dtype) -> None:
    """Bring the casts for compiled code up to date, in a region that was just entered."""
    for module in list(_layers.values()):
        layer = module.__dict__.get(_HeldLayer.KEY)
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        if layer is None or layer.device != device or weight is None:
            continue
        found = _looked_up(weight, dtype, device)
        layer.weight = None if found is None else found[1].low
        found = None if bias is None else _looked_up(bias, dtype, device)
        layer.bias = bias if found is None else found[1].low
        layer.dtype = dtype
    held.fresh = True


def covers(module: nn.Module) -> bool:
    """Return whether a module is a layer whose class is known to read its weights in one op."""
    return _extension(module) is not None


def _extension(module: nn.Module) -> type[_HeldLayer] | None:
    if isinstance(module, (torch.jit.ScriptModule, nn.modules.lazy.LazyModuleMixin)):
        return None
    weight = module._parameters.get("weight")
    if weight is None or "bias" not in module._parameters:
        return None
    forward: Any = type(module).forward
    for layer, extension in LAYERS.items():
        if isinstance(module, layer) and forward in (layer.forward, extension.forward):
            return extension if getattr(module, "padding_mode", "zeros") == "zeros" else None
    return None


def _op(module: nn.Module) -> str:
    layer = next(layer for layer in LAYERS if isinstance(module, layer))
    return layer.__name__.lower() + (
        ".padding" if hasattr(module, "padding") and isinstance(module.padding, str) else ""
    )


def take(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Have the layers of models read held casts, until `let_go`; return the layers."""
    taken = []
    for module in dict.fromkeys(m for model in models for m in model.modules()):
        extension = _extension(module)
        weight = module._parameters.get("weight")
        if extension is None or weight is None:
            continue
        op, device = _op(module), weight.device.type
        if op not in lent_kernels.lowered(device):
            continue
        layer = module.__dict__.get(_HeldLayer.KEY)
        if layer is None:
            layer = Layer(op, device)
            subclass.extend(module, extension, layer)
            _layers[id(module)] = module
        layer.blocks += 1
        taken.append(module)
    return taken


def let_go(modules: Iterable[nn.Module]) -> None:
    """Undo one `take`."""
    for module in modules:
        layer = module.__dict__[_HeldLayer.KEY]
        layer.blocks -= 1
        if not layer.blocks:
            _layers.pop(id(module), None)
            subclass.restore(module, _HeldLayer)
    if not _layers:
        held.fresh, held.refresh = False, None


def bare(models: Iterable[nn.Module], weights: Iterable[held_casts.Weight]) -> bool:
    """Return whether an op may cast one of the weights where no layer of `take` hands it over.

    Parameters of fewer than two dimensions do not count, nor tables of embeddings: they are in no
    product, or beside a weight that counts.
    """
    known: set[int] = set()
    for module in (m for model in models for m in model.modules()):
        if covers(module) or isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            known.update(map(id, module._parameters.values()))
    return any(w.tensor.dim() > 1 and id(w.tensor) not in known for w in weights)
