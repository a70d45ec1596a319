"""`low_weights`: the parameters of any optimizer kept in bfloat16, so that they still learn."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn as nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from polymp import weights
from polymp.backends.torch.autocast import region_casts
from polymp.backends.torch.compat import distributed, optimizers
from polymp.backends.torch.weights import freeze_usage, low_parameters, low_step
from polymp.backends.torch.weights.low_parameters import GROUP, OURS, LowWeights, as_saved
from polymp.errors import brief
from polymp.weights import summary

Forward = Callable[[], object]
Keep = torch.Tensor | nn.Module | Forward


def low_weights(
    optimizer: torch.optim.Optimizer,
    mode: str = "split",
    keep: Keep | Iterable[Keep] = (),
    *,
    seed: int = 0,
) -> Any:
    """Keep the parameters of an optimizer in bfloat16, with what they need beside them to learn.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = polymp.torch.low_weights(optimizer, keep=lambda: loss_of(model, batch))
        ...                                  # the loop as before

    Most updates of bfloat16 weights round away. Here the optimizer steps on float32 values:

        mode          beside each weight           bytes a parameter with Adam    float32 weight
        master        float32 copy                 16                             exact
        split         the other 16 bits            14                             exact
        stochastic    nothing                      12                             right on average

    Parameters stay the same objects; their memory, and that of their gradients, is low from now on.
    Call it after the optimizer is made and the model is on its device and sharded (FSDP2), and
    before DDP, a scheduler, the first step, and the first run of a sharded model.

    Where a region only casts a weight to its dtype, `master` and `split` train to the same bits as
    float32 parameters, up to the sum of several gradients of one weight. Weights that float32 ops
    read, such as those of norms, would be rounded there: `keep` finds them.

    Weights that are written by hand between two steps hold what was written. In `split` the old
    remainder stays beside them, which is at most half of the last place.

    Args:
        optimizer: any but SparseAdam.
        mode: "master", "split" or "stochastic".
        keep: what stays float32; all else is stored low. A function that runs the model in its
            region, for the parameters that the region does not only cast to bfloat16: it is
            called once, and what it changes, such as running means, stays changed. Parameters;
            modules with parameters, also of a sharded model; or a list of these.
        seed: of the random bits of `stochastic`.

    Returns:
        The optimizer, of class `Low...`. Its `low` and `kept` say what is stored low, and why the
        others are not; `print` shows it. Its state_dict has what stands beside the weights.

    Raises:
        TypeError: `optimizer` is no optimizer, is SparseAdam, or keeps weights low already;
            `keep` has something else than parameters, modules and functions.
        ValueError: no such mode; no parameter can be stored low; a scheduler has wrapped the
            optimizer's step; a parameter is lazy; a function in `keep` runs no region that casts a
            parameter, or runs the model under DDP or FSDP.
        RuntimeError: later, at a step, if the model was cast after this call.
    """
    kind: Any = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"low_weights() takes a torch.optim.Optimizer, got {brief(optimizer)}. Write: "
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
    if any(map(is_lazy, optimizers.parameters(optimizer))):
        raise ValueError(
            f"low_weights(): this {kind.__name__} has lazy parameters, which get their values in "
            "the first call of the model. Call the model once before low_weights()."
        )
    if "step" in vars(optimizer):
        raise ValueError(
            f"low_weights(): the step of this {kind.__name__} was replaced, as a learning-rate "
            "scheduler does. Call low_weights() first, and make the scheduler with what it returns."
        )
    chosen = weights.mode(mode)
    kept_low = LowWeights(chosen, seed, _kept(optimizer, keep))
    every = optimizers.parameters(optimizer)
    reasons = [kept_low.kept.get(p) or low_parameters.why_kept(p) for p in every]
    if all(reasons):
        raise ValueError(
            f"low_weights(): no parameter of this {kind.__name__} can be stored low: "
            f"{'; '.join(sorted(set(reasons)))}."
        )
    kept_low.take(optimizer)
    made: Any = optimizer
    made.__class__ = low_class(kind)
    made._low = kept_low
    return made


def _kept(optimizer: Optimizer, keep: Keep | Iterable[Keep]) -> dict[torch.Tensor, str]:
    """Return the parameters that the caller wants to keep, and why."""
    mine = dict.fromkeys(optimizers.parameters(optimizer))
    found: dict[torch.Tensor, str] = {}
    listed = isinstance(keep, Iterable) and not isinstance(keep, (torch.Tensor, str))
    several: Any = keep if listed and not callable(keep) else [keep]
    for each in several:
        # Else a loss, not its function, or a batch. Another optimizer may have the parameter.
        leaf = isinstance(each, torch.Tensor) and each.is_leaf
        weight = leaf and (isinstance(each, nn.Parameter) or each.requires_grad or each in mine)
        if weight or isinstance(each, nn.Module):
            params = each.parameters() if isinstance(each, nn.Module) else [each]
            found.update((p, "is in keep=") for p in params if p in mine)
        elif callable(each) and not isinstance(each, type):
            found.update(_read_in_float32(mine, each))
        else:
            raise TypeError(
                "low_weights(keep=...) takes parameters, modules, and a function that runs the "
                f"model in its region, got {brief(each)}. Write keep=lambda: loss_of(model, "
                "batch), or keep=[model.head, model.embedding.weight]."
            )
    return found


def _read_in_float32(mine: dict[torch.Tensor, None], forward: Forward) -> dict[torch.Tensor, str]:
    """Run the model, and return the parameters with another use than a cast to bfloat16."""

    def refuse(module: nn.Module, _: object) -> None:
        if distributed.will_talk(module) and not mine.keys().isdisjoint(module.parameters()):
            raise ValueError(
                f"low_weights(keep=...): the function runs a {type(module).__name__}, before "
                "low_weights() has stored its weights low. Wrap a model in DDP after it. For FSDP2 "
                "write keep=[model.norm, ...], with the modules whose weights stay float32."
            )

    tensors = freeze_usage.sharing((str(at), p) for at, p in enumerate(mine))
    groups = [freeze_usage.Group(each) for each in tensors]
    region_casts.drop()  # a cast that a region around this has kept would not be seen
    with register_module_forward_pre_hook(refuse), freeze_usage.Uses(groups, torch.bfloat16, {}):
        forward()
    if not any(group.cast for group in groups):
        raise ValueError(
            "low_weights(keep=...): the function cast no parameter of the optimizer to bfloat16. "
            "It has to run the model in its region: with autocast(device, dtype=torch.bfloat16): "
            "model(x)."
        )
    unused = "is not used in the forward pass"
    return {p: g.why or unused for g in groups if g.why or not g.cast for p in g.each()}


# `LowOptimizer`: what is added to the class of an optimizer whose parameters are kept low.


class LowOptimizer(Optimizer):
    """An optimizer that keeps its parameters low; made by `low_weights`."""

    _low: LowWeights
    _kind: type[Optimizer]

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError(
            f"{type(self).__name__} is made by polymp.torch.low_weights(optimizer), from an "
            f"optimizer of class {self._kind.__name__}."
        )

    @property
    def low(self) -> list[torch.Tensor]:
        """The parameters that are stored low."""
        return list(self._low.places)

    @property
    def kept(self) -> dict[torch.Tensor, str]:
        """The other parameters, and why each stays as it is."""
        return dict(self._low.kept)

    def __repr__(self) -> str:
        """Show the groups, which parameters are not stored low, and why."""
        reasons, names = self._low.kept, optimizers.names(self)
        kept = {f"{n} {list(p.shape)}": reasons[p] for p, n in names.items() if p in reasons}
        mode, low = self._low.mode.name, len(self._low.places)
        return f"{super().__repr__()}\n{summary(mode, kept, low)}"

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        """Call the class's own; here, so that it is called in a step alone, on float32 values."""
        own: Any = self._kind
        return own._init_group(self, *args, **kwargs)

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        if torch.compiler.is_compiling():
            return low_step.take_compiled_step(self, closure)
        with torch.no_grad():
            return low_step.take_step(self, closure)

    _step.__name__ = "step"
    step: Any = Optimizer.profile_hook_step(_step)
    step.hooked = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and store its parameters low."""
        super().add_param_group(param_group)
        self._low.take(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with what stands beside each weight and the mode."""
        # The remainders of `split` are in it as bfloat16 of the same bits.
        saved: dict[str, Any] = super().state_dict()
        state = dict(saved["state"])
        for number, p in self._numbered(saved):
            if p in self._low.places:
                own = {**self._low.entries(self.state, p), **state.get(number, {})}
                state[number] = {k: as_saved(v) for k, v in own.items()}
        return {**saved, "state": state}

    def _numbered(self, state_dict: Mapping[str, Any]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the parameters with their numbers in a state_dict."""
        numbers = (n for group in state_dict["param_groups"] for n in group["params"])
        return zip(numbers, optimizers.parameters(self), strict=False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this method's counterpart, or a plain float32 optimizer, has saved.

        What stands beside a weight belongs to the low weight: load the model's checkpoint as well,
        before or after, and before the next step.

        Args:
            state_dict: of an optimizer in the same mode, or of one with float32 parameters, whose
                weights are then taken as the model has them.

        Raises:
            ValueError: the mode or the parameters that are low are others; nothing was changed.
        """
        low, state = self._low, state_dict["state"]
        beside = {
            p: {key: state[number][key] for key in OURS if key in state[number]}
            for number, p in self._numbered(state_dict)
            if number in state
        }
        self._check(state_dict, beside)
        plain = {
            number: {key: value for key, value in entry.items() if key not in OURS}
            for number, entry in state.items()
            if not entry or entry.keys() - {*OURS}
        }
        # State is cast to the dtypes of the parameters: float32 tensors stand in for the low ones.
        stand_ins = {
            p: torch.empty(0, dtype=torch.float32, device=distributed.local(p).device)
            for p in low.places
        }
        kept = [p for p in optimizers.parameters(self) if p not in stand_ins]
        loan = low_step.Loan(self, stand_ins, kept)
        hooks = self._optimizer_load_state_dict_post_hooks
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        loan.give()
        try:
            super().load_state_dict({**state_dict, "state": plain})
        finally:
            loan.take_back()
            self._optimizer_load_state_dict_post_hooks = hooks
        for group in self.param_groups:
            group[GROUP] = low.mode.name
        with torch.no_grad():
            for p, entries in beside.items():
                own = low.entries(self.state, p) if entries else {}
                for key, value in entries.items():
                    as_saved(own[key]).copy_(as_saved(value))
        for hook in hooks.values():
            hook(self)

    def _check(
        self, state_dict: Mapping[str, Any], beside: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> None:
        """Raise if a state_dict does not fit how the parameters are kept."""
        modes = {group.get(GROUP) for group in state_dict["param_groups"]}
        mine, low = self._low.mode.name, self._low.places
        if modes - {None, mine}:
            other = ", ".join(sorted(repr(mode) for mode in modes - {None, mine}))
            raise ValueError(
                f"load_state_dict(): the state was saved with mode {other}, and this optimizer "
                f"keeps its weights with mode {mine!r}. Make it with low_weights(optimizer, "
                f"mode={other}). To change the mode, load both there, take "
                "float32_state_dict(model), and load that into the model here before "
                "low_weights()."
            )
        for at, p in enumerate(optimizers.parameters(self)):
            theirs = beside.get(p, {})
            if mine in modes and bool(theirs) != (p in low):
                there, here = ("low", "kept") if theirs else ("kept", "low")
                raise ValueError(
                    f"load_state_dict(): parameter {at}, of shape {tuple(p.shape)}, was {there} "
                    f"in the run that saved the state, and is {here} here. Call low_weights() with "
                    "the same keep= as there."
                )
            own = self._low.entries(self.state, p) if p in low else {}
            for key, value in theirs.items() if own else ():
                wanted = _kind(as_saved(own.get(key)))
                if _kind(as_saved(value)) != wanted:
                    raise ValueError(
                        f"load_state_dict(): {key!r} of parameter {at} is {_kind(value)}, and has "
                        f"to be {wanted}. Load it as it was saved: a cast loses bits of the weight."
                    )

    def complete_state(self) -> None:
        """Put into the state what belongs there before a step; for what copies and restores it."""
        self._low.complete(self)

    def float32_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the state_dict of a model with its low weights as float32.

        A model without low weights loads it, and after `low_weights` a run in any mode goes on.

        Args:
            model: whose parameters this optimizer has.

        Returns:
            The state_dict; low weights in it are copies, the others share memory as usual.
        """
        found = model.state_dict()
        for name, p in model.named_parameters(remove_duplicate=False):
            if name in found and p in self._low.places:
                (piece,) = self._low.read(self.state, [p])
                ((_, full),) = piece.values()
                found[name] = full.clone()
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_low": self._low}

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return _rebuilt, (self._kind, self.__getstate__())


def _rebuilt(kind: Any, state: dict[str, Any]) -> Optimizer:
    made: Any = object.__new__(low_class(kind))
    made.__setstate__(state)
    return made  # type: ignore[no-any-return]


@cache
def low_class(kind: Any) -> type[Optimizer]:
    """Return the class of optimizers of a kind that keep their parameters low."""
    return type(f"Low{kind.__name__}", (LowOptimizer, kind), {"_kind": kind})


def _kind(value: Any) -> str:
    """Return the dtype and shape of a tensor, as messages show them."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
