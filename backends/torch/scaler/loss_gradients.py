"""Gradients of several losses: unscaled loss by loss, added up, and checked as a sum."""

import torch
from torch.amp.grad_scaler import OptState

from polymp.backends.torch.scaler import unscale
from polymp.backends.torch.scaler.findings import Entry, Findings
from polymp.backends.torch.scaler.grad_scaler import GradScaler
from polymp.backends.torch.scaler.properties import findings_of


def unscale_new(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Unscale new gradients, and add the finding to those of the same iteration before."""
    entry = findings_of(scaler).entries[id(optimizer)]
    before, entry["stage"] = entry["found_inf_per_device"], OptState.READY
    scaler.unscale_(optimizer)
    found = entry["found_inf_per_device"]
    for device, finding in before.items():
        found[device] = torch.maximum(found[device], finding) if device in found else finding


def look_at_sums(
    optimizer: torch.optim.Optimizer, findings: dict[str, Findings], looked: dict[str, Entry]
) -> None:
    """Check the sums of true gradients; an overflow there counts for every loss."""
    first = next(iter(looked))
    lead, entry = findings[first], looked[first]
    found = unscale.either(findings[name].found(e) for name, e in looked.items())
    assert found is not None
    before = dict(entry)
    lead.look(optimizer, None, unscale.unscale, allow_fp16=True)
    lost = (lead.found(entry) - found).clamp(min=0)
    entry.update(before)
    for name, e in looked.items():
        e["found_inf_per_device"] = {lost.device: torch.maximum(findings[name].found(e), lost)}


def add(param: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Add a gradient to that of a parameter, as backward does."""
    with torch.no_grad():
        if grad is None:
            return
        if param.grad is None:
            param.grad = grad
        elif grad.layout is not torch.strided and param.grad.layout is torch.strided:
            param.grad.add_(grad)
        else:
            param.grad = grad.add_(param.grad)
