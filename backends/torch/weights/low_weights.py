"""`low_weights`: the parameters of any optimizer kept in 16 bits, so that they still learn."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn as nn

from polymp.backends.torch.weights import low_parameters, needs_float32
from polymp.backends.torch.weights.low_optimizer import LowOptimizer, low_class
from polymp.backends.torch.weights.low_parameters import LowWeights
from polymp.weights import modes

Forward = Callable[[], object]
Keep = torch.Tensor | nn.Module | Forward


def low_weights(
    optimizer: torch.optim.Optimizer,
    mode: str = "split",
    dtype: torch.dtype | str = torch.bfloat16,
    keep: Mapping[torch.Tensor, str] | Keep | Iterable[Keep] = (),
    *,
    seed: int = 0,
) -> Any:
    """Keep the parameters of an optimizer in 16 bits, with what they need beside them to learn.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = polymp.torch.low_weights(optimizer, keep=lambda: loss_of(model, batch))
        ...                                  # the loop as before

    Weights in bfloat16 move by whole last places or not at all, so that most updates of most
    optimizers round away. Here the optimizer steps on float32 values:

        mode          beside each weight           bytes a parameter with Adam    float32 weight
        master        float32 copy                 16                             exact
        split         the other 16 bits            14                             exact
        stochastic    nothing                      12                             right on average

    Bytes are those of the weight, its gradient, what is beside it and Adam's state. Autocast on
    float32 parameters takes 18 while it holds casts.

    Parameters stay the same objects; their memory, and that of their gradients, is low from now on.
    Call it after the optimizer is made and the model is on its device and sharded (FSDP2), and
    before DDP, a scheduler and the first step. The returned optimizer is the one given, with a
    class that is a subclass of its own.

    A region never casts a weight that has its dtype. Where every use of a weight would be such a
    cast, `master` and `split` train to the same bits as float32 parameters in the region, up to
    the sum of several gradients of one weight, which is a float32 sum there. Weights that feed
    float32 ops, such as norms, would be rounded there. To keep them, give `keep` a function that
    runs the model in its region: it runs once, and which op reads which weight in float32 is seen
    there, as the region's own policy has it. Without it nothing is known of the uses of a weight,
    and all but those of `keep` are stored low.

    A step makes float32 parameters of at most 128 MiB, or of one parameter, at a time. For an
    optimizer that is not of torch.optim, and for LBFGS, it makes all of them, because such a step
    may look at all parameters at once.

    Weights that are written by hand between two steps hold what was written. A write that raises no
    version of the parameter, as `p.data.copy_()`, keeps the old remainder in `split`, which is at
    most half of the last place.

    Args:
        optimizer: any but SparseAdam.
        mode: "master", "split" or "stochastic".
        dtype: bfloat16; with `master` float16, too.
        keep: what stays float32. A function that runs the model in its region, for the parameters
            that `needs_float32` finds; parameters; modules with parameters; or a list of these. Or
            parameters with a reason each, as `needs_float32` returns them.
        seed: of the random bits of `stochastic`.

    Returns:
        The optimizer, of class `Low...`. Its `low` and `kept` say what is stored low, and why the
        others are not; `print` shows it. Its state_dict has what stands beside the weights.

    Raises:
        TypeError: `optimizer` is no optimizer, is SparseAdam, or keeps weights low already;
            `keep` has something else than parameters, modules and functions.
        ValueError: no such mode, or the mode does not take the dtype; no parameter can be stored
            low; a scheduler has wrapped the optimizer's step; a function in `keep` runs no region
            that casts a parameter.
    """
    kind: Any = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"low_weights() takes a torch.optim.Optimizer, got {optimizer!r:.80}. Write: "
            "optimizer = low_weights(torch.optim.AdamW(model.parameters()))."
        )
    if isinstance(optimizer, LowOptimizer):
        raise TypeError(
            f"low_weights(): this {kind.__name__} keeps its parameters low already, with mode "
            f"{optimizer._low.mode.name!r}. Make a new optimizer to change the mode."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TypeError(
            "low_weights() does not take SparseAdam: it updates the rows that have a gradient, and "
            "a step on low weights would store the whole weight again. Give the embeddings "
            "SparseAdam on float32, and the other parameters an optimizer of their own."
        )
    if "step" in vars(optimizer):
        raise ValueError(
            f"low_weights(): the step of this {kind.__name__} was replaced, as a learning-rate "
            "scheduler does. Call low_weights() first, and make the scheduler with what it returns."
        )
    chosen = modes.mode(mode)
    name = modes.low_dtype(chosen, dtype)
    kept = _kept(optimizer, keep, name)
    weights = LowWeights(chosen, name, seed, {}, kept, {}, {}, {})
    every = [p for group in optimizer.param_groups for p in group["params"]]
    if all(p in kept or low_parameters.why_kept(p) for p in every):
        why = {kept.get(p) or low_parameters.why_kept(p) for p in every}
        raise ValueError(
            f"low_weights(): no parameter of this {kind.__name__} can be stored low: "
            f"{'; '.join(sorted(why))}."
        )
    first = 0
    for group in optimizer.param_groups:
        low_parameters.take(weights, optimizer.state, group, first)
        first += len(group["params"])
    made: Any = optimizer
    made.__class__ = low_class(kind)
    made._low, made._compiled = weights, {}
    return made


def _kept(
    optimizer: torch.optim.Optimizer,
    keep: Mapping[torch.Tensor, str] | Keep | Iterable[Keep],
    name: str,
) -> dict[torch.Tensor, str]:
    """Return the parameters that the caller wants to keep, and why."""
    mine = {p for group in optimizer.param_groups for p in group["params"]}
    found: dict[torch.Tensor, str] = {}
    several: Any = [keep] if isinstance(keep, torch.Tensor) or callable(keep) else keep
    for each in several:
        if isinstance(each, (torch.Tensor, nn.Module)):
            why = keep[each] if isinstance(keep, Mapping) else "is in keep="  # type: ignore[index]
            params = each.parameters() if isinstance(each, nn.Module) else [each]
            found.update((p, why) for p in params if p in mine)
        elif callable(each) and not isinstance(each, type):
            said = "low_weights(keep=...): the function"
            found.update(needs_float32.reads(optimizer, each, name, said))
        else:
            raise TypeError(
                "low_weights(keep=...) takes parameters, modules, and a function that runs the "
                f"model in its region, got {each!r:.80}. Write keep=lambda: loss_of(model, batch), "
                "or keep=[model.head, model.embedding.weight]."
            )
    return found
