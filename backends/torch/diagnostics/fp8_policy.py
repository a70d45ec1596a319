"""`fp8_policy`: the policy for a model whose first and last products stay in bfloat16."""

from typing import Any

import torch
import torch.nn as nn

from polymp.backends.torch.autocast.api import PolicyLike, autocast
from polymp.backends.torch.diagnostics.explain import explain
from polymp.backends.torch.modules.scoped import scoped_anew
from polymp.diagnostics.call_record import FORWARD
from polymp.errors import PolicyError
from polymp.rules import policy_files
from polymp.rules.fp8_ends import kept_lower
from polymp.rules.policy import Policy
from polymp.rules.row import Rule


def fp8_policy(
    model: nn.Module, *args: object, policy: PolicyLike = "fp8", **kwargs: Any
) -> Policy:
    """Return a policy with rule fp8 that keeps a model's first and last product in bfloat16.

        policy = fp8_policy(model, x)
        scoped(model, policy)
        with autocast("cuda", torch.bfloat16):
            loss = loss_fn(model(x), y)

    The first product reads the data, and the last one makes the scores: their rounding errors reach
    the loss more directly than those of the layers between. With arguments, the model is called
    once with them, without gradients, and the products are taken in the order of the calls. Without
    arguments, they are the model's `nn.Linear` modules in the order of `model.named_modules()`.

    Args:
        model: that is to be trained.
        args: of a call of it.
        policy: with rows of rule fp8.
        kwargs: of the call.

    Returns:
        The policy, with a scope for each of the two modules. Give it to `scoped`.

    Raises:
        TypeError: `model` is no module.
        PolicyError: the policy has no rows with rule fp8; the model has fewer than three products;
            or one of the two is called outside of all submodules.
    """
    where = "fp8_policy()"
    if not isinstance(model, nn.Module):
        raise TypeError(f"{where} takes a torch.nn.Module, not {model!r:.80}.")
    loaded = policy_files.load(policy)
    if not loaded.fp8:
        kept_lower(loaded, (), where)  # raises
    paths = _called(model, loaded, args, kwargs) if args or kwargs else _modules(model)
    if len(set(paths)) < 3:
        found = ", ".join(map(repr, dict.fromkeys(paths))) or "none"
        raise PolicyError(
            f"{where}: {type(model).__name__} has products in fewer than three modules ({found}). "
            "Without the first and the last, none is left to run in 8 bits. Write policy='fp8' to "
            "run all in 8 bits."
        )
    return kept_lower(loaded, (paths[0], paths[-1]), where)


def _called(model: nn.Module, policy: Policy, args: Any, kwargs: Any) -> list[str]:
    """Return the paths of the modules that call products, in the order of the calls."""
    device = next((t.device.type for t in model.parameters()), "cpu")
    with torch.no_grad(), scoped_anew([model], policy), explain(model=model) as report:
        with autocast(device, torch.bfloat16, policy=policy.at("")):
            model(*args, **kwargs)
    return [
        call.module
        for call in report
        if call.direction == FORWARD and call.row is not None and call.row.rule is Rule.FP8
    ]


def _modules(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
