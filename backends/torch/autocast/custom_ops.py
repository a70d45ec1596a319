"""Ops of the user's own in torch: those of torch.library, and autograd functions.

An op of `torch.library` gets our kernel on the autocast keys, as torch's own ops do. An
`autograd.Function` is no op of the dispatcher: `custom_fwd` and `custom_bwd` decorate its methods.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from polymp.backends.torch.autocast import dtype_names, kernel_registry, regions, torch_table
from polymp.backends.torch.autocast.api import autocast
from polymp.backends.torch.autocast.autocast_kernel import eligible
from polymp.backends.torch.compat import dispatcher
from polymp.errors import PolicyError
from polymp.rules.vocabulary import vocabulary


def spelled(given: object, where: str) -> tuple[str, ...]:
    """Return the names of the ops of `torch.library` that are registered."""
    several = given if isinstance(given, (list, tuple)) else [given]
    return tuple(_overload(one, where) for one in several)


def _overload(given: object, where: str) -> str:
    """Return the name, such as "mylib::my_op", of an op that was given to be registered."""
    name = dispatcher.qualified_name(given)
    if name is None:
        raise TypeError(
            f"{where}: torch={given!r} is no op. Give its name, such as 'mylib::my_op', or what "
            "torch.library.custom_op returned. To an autograd.Function, give its dtype by "
            "polymp.torch.custom_fwd(cast_inputs=...)."
        )
    if "::" not in name:
        raise PolicyError(f"{where}: {name!r} has no namespace. Write it as 'mylib::my_op'.")
    if name.startswith("aten::"):
        raise PolicyError(f"{where}: {name!r} is torch's own. Give it a rule in a policy instead.")
    op = dispatcher.overload(name)
    if op is None:
        raise PolicyError(f"{where}: torch has no op {name!r}. Define it first.")
    fault = torch_table.schema_fault(op, name)
    if fault:
        raise PolicyError(f"{where}: {name!r} is an op {fault}")
    for device in torch_table.DEVICES:
        key = dispatcher.autocast_key(device)
        known = vocabulary().of_aten(name)  # registering twice raises later, with another message
        if key and not known and dispatcher.has_kernel(name, key):
            raise PolicyError(
                f"{where}: {name!r} has an autocast kernel already, on {device}. Leave out its "
                "torch.library.register_autocast."
            )
    return name


def install(names: Sequence[str]) -> None:
    """Put our kernel on the autocast keys of ops, which `spelled` has checked."""
    for device in torch_table.DEVICES:
        kernel_registry.put(device, names)


# `custom_fwd` and `custom_bwd`: autograd functions that follow the region they are used in.


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
        ctx._policy = regions.code_in_force()
        ctx._fwd_used_autocast = enabled and cast_inputs is None
        if cast_inputs is None or not enabled:
            return fwd(*args, **kwargs)
        with autocast(device_type, enabled=False):
            return fwd(
                *cast_inside(args, device_type, cast_inputs),
                **cast_inside(kwargs, device_type, cast_inputs),
            )

    return forward


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
    """Cast the float tensors of a device in a value, at any depth of containers."""
    # Lists, tuples and named tuples keep their type; a mapping becomes a dict, another iterable an
    # iterator. Strings, bytes and what numpy defines are left alone.
    match value:
        case torch.Tensor():
            return value.to(dtype) if eligible(value, device_type) else value
        case str() | bytes():
            return value
        case _ if type(value).__module__ == "numpy":
            return value
        case Mapping():
            return {
                cast_inside(k, device_type, dtype): cast_inside(v, device_type, dtype)
                for k, v in value.items()
            }
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
