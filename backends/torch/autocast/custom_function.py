"""`custom_fwd` and `custom_bwd`: autograd functions that follow the region they are used in."""

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar, overload

import torch

from polymp.backends.torch.autocast import dtype_names, policy_code
from polymp.backends.torch.autocast.api import autocast

P = ParamSpec("P")
R = TypeVar("R")


@overload
def custom_fwd(
    fwd: Callable[P, R], *, device_type: str, cast_inputs: torch.dtype | str | None = None
) -> Callable[P, R]: ...


@overload
def custom_fwd(
    fwd: None = None, *, device_type: str, cast_inputs: torch.dtype | str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def custom_fwd(
    fwd: Callable[..., Any] | None = None,
    *,
    device_type: str,
    cast_inputs: torch.dtype | str | None = None,
) -> Callable[..., Any]:
    """Decorate the `forward` of a `torch.autograd.Function`.

        class Double(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
            def forward(ctx, x): ...

    Without `cast_inputs`, forward runs in the region as it is. With it, inside an enabled region,
    float inputs on the device (float64 excepted) are cast to it, however deep they sit in
    containers, and forward runs with autocast off; outside of regions the argument has no effect.

    Args:
        fwd: the forward, whose first argument is the ctx; None to decorate with arguments.
        device_type: the device type whose region counts.
        cast_inputs: the dtype that inputs are cast to, torch's own or a name such as "fp32"; None
            to leave them.

    Returns:
        The decorated forward; without `fwd`, a decorator.

    Raises:
        ValueError: `device_type` is not a string, or `cast_inputs` no name of a float dtype.
    """
    _check(device_type)
    if isinstance(cast_inputs, str):
        cast_inputs = dtype_names.of(cast_inputs, "custom_fwd(): cast_inputs")
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def forward(*args: Any, **kwargs: object) -> Any:
        ctx, enabled = args[0], torch.is_autocast_enabled(device_type)
        ctx._dtype = torch.get_autocast_dtype(device_type)
        ctx._policy = policy_code.policy_of(device_type)
        ctx._fwd_used_autocast = enabled and cast_inputs is None
        if cast_inputs is None or not enabled:
            return fwd(*args, **kwargs)
        with autocast(device_type, enabled=False):
            return fwd(
                *cast_inside(args, device_type, cast_inputs),
                **cast_inside(kwargs, device_type, cast_inputs),
            )

    return forward


@overload
def custom_bwd(bwd: Callable[P, R], *, device_type: str) -> Callable[P, R]: ...


@overload
def custom_bwd(
    bwd: None = None, *, device_type: str
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str) -> Callable[..., Any]:
    """Decorate the `backward` that belongs to a `custom_fwd`: it runs in the forward's region.

    Args:
        bwd: the backward, whose first argument is the ctx; None to decorate with arguments.
        device_type: as given to `custom_fwd`.

    Returns:
        The decorated backward; without `bwd`, a decorator.

    Raises:
        ValueError: `device_type` is not a string.
    """
    _check(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(*args: Any, **kwargs: object) -> Any:
        ctx = args[0]
        with autocast(
            device_type,
            enabled=ctx._fwd_used_autocast,
            dtype=ctx._dtype,
            policy=getattr(ctx, "_policy", None),
        ):
            return bwd(*args, **kwargs)

    return backward


def cast_inside(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Cast the float tensors of a device in a value, at any depth of containers.

    Dicts, lists, tuples and named tuples keep their type; another mapping becomes a dict, another
    iterable an iterator. Strings, bytes and what numpy defines are left alone.
    """
    match value:
        case torch.Tensor():
            eligible = value.is_floating_point() and value.dtype is not torch.float64
            return value.to(dtype) if eligible and value.device.type == device_type else value
        case str() | bytes():
            return value
        case _ if type(value).__module__ == "numpy":
            return value
        case Mapping():
            pairs = [
                (cast_inside(k, device_type, dtype), cast_inside(v, device_type, dtype))
                for k, v in value.items()
            ]
            if not isinstance(value, dict):
                return dict(pairs)
            try:
                result = copy.copy(value)  # a defaultdict keeps its factory, a subclass its fields
                result.clear()
                result.update(pairs)
            except Exception:  # a subclass that cannot be filled so becomes a dict, as in torch
                return dict(pairs)
            return result
        case Iterable():
            items = (cast_inside(v, device_type, dtype) for v in value)
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*items)
            return type(value)(items) if isinstance(value, (list, tuple)) else items
        case _:
            return value


def _check(device_type: str) -> None:
    if not isinstance(device_type, str):
        raise ValueError(f"Expected `device_type` of type `str`, got: `{type(device_type)}`")
