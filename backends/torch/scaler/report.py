"""Rows of a scaler's report: counts of the values of each gradient, and names of parameters."""

import weakref
from collections.abc import Iterable

import torch

from polymp.backends.torch.compat import distributed
from polymp.backends.torch.scaler import unscale
from polymp.scaling.gradient_report import SMALLEST_NORMAL, Gradient

Named = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]


class Names:
    """Names of parameters, by the tensor; keeps neither a module nor a tensor alive."""

    def __init__(self, named: Named | None = None) -> None:
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._pairs: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        if isinstance(named, torch.nn.Module):
            self._module = weakref.ref(named)
        elif named is not None:
            try:
                pairs = [(name, param) for name, param in named]
                good = all(isinstance(n, str) and isinstance(p, torch.Tensor) for n, p in pairs)
            except (TypeError, ValueError):
                good = False
            if not good:
                raise TypeError(
                    "named must be a module or pairs of a name and a parameter, such as "
                    f"model.named_parameters(); got {named!r}."
                )
            self._pairs = [(name, weakref.ref(param)) for name, param in pairs]

    def __reduce__(self) -> tuple[type["Names"], tuple[()]]:
        return Names, ()  # the parameters of a copied model are other tensors

    def of(self, optimizer: torch.optim.Optimizer) -> dict[int, str]:
        """Return a name for every parameter of the optimizer, its own or the place, by the id."""
        names: dict[int, str] = {}
        for at, group in enumerate(optimizer.param_groups):
            own = group.get("param_names") or [
                f"group {at}, parameter {i}" for i in range(len(group["params"]))
            ]
            names |= {id(p): n for p, n in zip(group["params"], own, strict=True)}
        module = None if self._module is None else self._module()
        if module is not None:
            names |= {id(p): name for name, p in module.named_parameters()}
        return names | {id(p): name for name, ref in self._pairs if (p := ref()) is not None}


def gradients(
    optimizer: torch.optim.Optimizer, names: dict[int, str], factor: torch.Tensor
) -> list[Gradient]:
    """Count the values of each gradient of the optimizer. Waits for the device, once."""
    rows, counts = [], []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                grad = distributed.local(param.grad)
                rows.append((names[id(param)], tuple(distributed.local(param).shape)))
                counts.append(unscale.moved(_counts(grad, factor), factor.device))
    if not counts:
        return []
    table = torch.stack(counts).tolist()
    return [Gradient(*row, *numbers) for row, numbers in zip(rows, table, strict=True)]


@torch.no_grad()
def _counts(grad: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Count Inf, NaN, zero and subnormal values; int64 [4]."""
    absent = 0
    if grad.layout is not torch.strided:  # absent elements are zeros
        values = grad.coalesce().values() if grad.layout is torch.sparse_coo else grad.values()
        absent, grad = grad.numel() - values.numel(), values
    size = grad.abs()  # of a complex number, its distance from 0
    wide = size if size.dtype is torch.float64 else size.float()
    tiny = wide * unscale.moved(factor, wide.device) < SMALLEST_NORMAL
    zero = wide == 0
    kinds = (wide.isinf(), wide.isnan(), zero, tiny & ~zero)
    return torch.stack([k.sum() for k in kinds]) + torch.tensor(
        [0, 0, absent, 0], device=wide.device
    )
