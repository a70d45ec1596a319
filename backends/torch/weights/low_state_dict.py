"""The state_dict of an optimizer whose parameters are kept low."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from polymp.backends.torch.compat import dtensor
from polymp.backends.torch.weights import low_parameters
from polymp.backends.torch.weights.low_parameters import GROUP, OURS, LowWeights


class Saved(NamedTuple):
    """A state_dict that may be loaded.

    Attributes:
        plain: it, without what stands beside weights.
        beside: that, by parameter.
    """

    plain: dict[str, Any]
    beside: dict[torch.Tensor, dict[str, Any]]


def shown(
    weights: LowWeights, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Return a state_dict with what stands beside every low weight."""
    state = dict(state_dict["state"])
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in zip(numbers, params, strict=False):
        if p in weights.places:
            with torch.no_grad():  # of a weight that other code wrote, what was written is saved
                low_parameters.prepare(weights, optimizer.state, p)
            if p in weights.versions:
                low_parameters.note_versions(weights, optimizer.state, p)
            own = {**low_parameters.ours(weights, optimizer.state, p), **state.get(number, {})}
            state[number] = {k: _viewed(v, torch.int16, torch.bfloat16) for k, v in own.items()}
    return {**state_dict, "state": state}


def _viewed(value: Any, dtype: torch.dtype, other: torch.dtype) -> Any:
    """Return a tensor of one dtype as the other one, on the same memory; all else as it is."""
    if not isinstance(value, torch.Tensor) or value.dtype is not dtype:
        return value
    return dtensor.like(dtensor.local(value).view(other), value)


def _kind(value: Any) -> str:
    """Return the dtype and shape of a tensor, as messages show them."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def checked(
    weights: LowWeights, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> Saved:
    """Return a state_dict in two parts, if it fits how the parameters are kept."""
    groups = state_dict["param_groups"]
    modes = {group.get(GROUP) for group in groups}
    mine = weights.mode.name
    if modes - {None, mine}:
        other = ", ".join(sorted(repr(mode) for mode in modes - {None, mine}))
        raise ValueError(
            f"load_state_dict(): the state was saved with mode {other}, and this optimizer keeps "
            f"its weights with mode {mine!r}. Make it with low_weights(optimizer, mode={other}). "
            "To change the mode, load both there, take float32_state_dict(model), and load that "
            "with load_float32_state_dict(model, ...) here."
        )
    state = state_dict["state"]
    numbers = [number for group in groups for number in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    beside = {
        p: {key: state[number][key] for key in OURS if key in state[number]}
        for number, p in zip(numbers, params, strict=False)
        if number in state
    }
    if mine in modes:
        for at, p in enumerate(params):
            was_low = bool(beside.get(p))
            if was_low != (p in weights.places):
                there, here = ("low", "kept") if was_low else ("kept", "low")
                raise ValueError(
                    f"load_state_dict(): parameter {at}, of shape {tuple(p.shape)}, was {there} "
                    f"in the run that saved the state, and is {here} here. Call low_weights() with "
                    "the same keep= as there."
                )
    for at, p in enumerate(params):
        own = low_parameters.ours(weights, optimizer.state, p) if p in weights.places else {}
        for key, value in beside.get(p, {}).items() if own else ():
            wanted = _viewed(own.get(key), torch.int16, torch.bfloat16)
            if _kind(_viewed(value, torch.int16, torch.bfloat16)) != _kind(wanted):
                raise ValueError(
                    f"load_state_dict(): {key!r} of parameter {at} is {_kind(value)}, and has to "
                    f"be {_kind(wanted)}. Load it as it was saved: a cast loses bits of the weight."
                )
    plain = {
        number: {key: value for key, value in entry.items() if key not in OURS}
        for number, entry in state.items()
    }
    kept = {number: entry for number, entry in plain.items() if entry or not state[number]}
    return Saved({**state_dict, "state": kept}, {p: found for p, found in beside.items() if found})


@contextmanager
def float32_stand_ins(weights: LowWeights, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put float32 tensors in the place of low parameters: their state is cast to their dtype."""
    stand_ins = {
        p: torch.empty(0, dtype=torch.float32, device=dtensor.local(p).device)
        for p in weights.places
    }
    back = {stand_in: p for p, stand_in in stand_ins.items()}
    own = {p: optimizer.state.pop(p) for p in stand_ins if p in optimizer.state}
    before = dict(optimizer.state)
    ours = {p: {k: v for k, v in entries.items() if k in OURS} for p, entries in own.items()}
    lists = [(group, list(group["params"])) for group in optimizer.param_groups]
    done = False
    try:
        for group, params in lists:
            group["params"] = [stand_ins.get(p, p) for p in params]
        yield
        done = True
    finally:
        for group in (*optimizer.param_groups, *(group for group, _ in lists)):
            group["params"] = [back.get(p, p) for p in group["params"]]
        if done:
            loaded = [(back.get(p, p), entries) for p, entries in optimizer.state.items()]
            optimizer.state.clear()
            optimizer.state.update(loaded)
            for p, entries in ours.items():
                optimizer.state[p].update(entries)
        else:
            optimizer.state.clear()
            optimizer.state.update({**before, **own})


def load_beside(weights: LowWeights, optimizer: torch.optim.Optimizer, saved: Saved) -> None:
    """Load what stands beside weights.

    Where the weights were loaded before, they belong together from now on. Otherwise a parameter
    is expected to be loaded yet: whatever is written to it before the next step belongs to what was
    loaded here.
    """
    for group in optimizer.param_groups:
        group[GROUP] = weights.mode.name
    for p, entries in saved.beside.items():
        own = low_parameters.ours(weights, optimizer.state, p)
        loaded = low_parameters.has_new_version(weights, p)
        with torch.no_grad():
            for key, value in entries.items():
                if own[key].dtype is torch.int16:
                    value = _viewed(value, torch.bfloat16, torch.int16)
                own[key].copy_(value)
        if loaded:
            low_parameters.note_versions(weights, optimizer.state, p)
        else:
            weights.versions.pop(p, None)
