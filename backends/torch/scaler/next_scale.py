"""The end of an iteration: the next scale, by what was found for its optimizers."""

from typing import cast

import torch

from polymp.backends.torch.scaler import unscale
from polymp.backends.torch.scaler.findings import Findings
from polymp.backends.torch.scaler.stuck_watch import StuckWatch


def advance(findings: Findings, stuck: StuckWatch, *, given: bool) -> None:
    """End the iteration, and bring the state on: on the host where it knows what was found."""
    looked = findings.looked()
    if not looked and not given:
        raise AssertionError("No inf checks were recorded prior to update.")
    findings.end_iteration()
    if not looked:
        return
    losses = [e["loss"] for e in looked if e.get("loss") is not None]
    if not torch.compiler.is_compiling() and all("skipped" in e for e in looked):
        skipped = any(e["skipped"] for e in looked)
        lost = skipped and any(loss.item() for loss in losses)
        stuck.look(findings.state.update_on_host(skipped=skipped, loss_lost=lost, given=given))
    else:
        found = cast(torch.Tensor, unscale.either(findings.largest(e) for e in looked))
        findings.state.update_on_device(found, losses, given=given)
        stuck.updated()
