"""Ops of the user's own in torch: those of torch.library, and decorated Python functions.

An op of `torch.library` gets our kernel on the autocast keys, as torch's own ops do. A plain
function and the `apply` of an `autograd.Function` are no ops of the dispatcher: the decorator wraps
them in a function that asks the policy at every call.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from polymp.backends.torch.autocast import dtype_names, kernel_registry, regions, torch_table
from polymp.backends.torch.autocast.api import autocast
from polymp.backends.torch.autocast.autocast_kernel import eligible, forbid
from polymp.backends.torch.compat import dispatcher, dynamo
from polymp.errors import PolicyError
from polymp.rules import decision_log
from polymp.rules.row import Rule
from polymp.rules.vocabulary import vocabulary

_PYTHON = "python::"  # before the names of what asks the policy by itself


def spelled(given: Any, name: str, where: str) -> tuple[tuple[str, ...], Any]:
    """Return the spellings of what is registered, and what is called in its place."""
    if not callable(given) or dispatcher.qualified_name(given) is not None:
        several = given if isinstance(given, (list, tuple)) else [given]
        return tuple(_overload(one, where) for one in several), given
    if isinstance(given, type):
        name = given.__name__
        raise TypeError(
            f"{where}: torch={name} is a class. Of an autograd.Function, register {name}.apply."
        )
    if not hasattr(given, "__qualname__"):  # such as a partial
        raise TypeError(f"{where}: torch={given!r} has no name. Register a function that calls it.")
    named, whole, owner = given, given, getattr(given, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        if given == owner.apply:  # each `apply` has the same name
            named, whole = owner, _backward_off(owner).apply
    spelling = f"{_PYTHON}{named.__module__}.{named.__qualname__}"
    return (spelling,), functools.wraps(given)(functools.partial(_call, name, given, whole))


def _backward_off(function: Any) -> Any:
    """Return an `autograd.Function` whose backward runs with autocast off, as forward does."""
    name = "vjp" if function.backward is torch.autograd.Function.backward else "backward"
    backward = getattr(function, name)  # `vjp` is torch's other name for it

    def off(ctx: object, *grads: object) -> Any:
        with autocast(next((t.device.type for t in _tensors(grads)), "cpu"), enabled=False):
            return backward(ctx, *grads)

    return type(function.__name__, (function,), {name: staticmethod(off)})


def _overload(given: object, where: str) -> str:
    """Return the name, such as "mylib::my_op", of an op that was given to be registered."""
    name = dispatcher.qualified_name(given)
    if name is None:
        raise TypeError(
            f"{where}: torch={given!r} is no op. Give its name, such as 'mylib::my_op', what "
            "torch.library.custom_op returned, or a function."
        )
    if "::" not in name:
        raise PolicyError(f"{where}: {name!r} has no namespace. Write it as 'mylib::my_op'.")
    op = dispatcher.overload(name)
    if op is None:
        raise PolicyError(f"{where}: torch has no op {name!r}. Define it first.")
    if op.namespace == "aten":
        raise PolicyError(f"{where}: {name!r} is torch's own. Give it a rule in a policy instead.")
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
    ops = [name for name in names if not name.startswith(_PYTHON)]
    for device in torch_table.DEVICES:
        kernel_registry.put(device, ops)


def _call(
    name: str, fn: Callable[..., Any], whole: Callable[..., Any], /, *args: object, **kwargs: object
) -> Any:
    """Call `whole` by the row that the policy in force has for the op; `fn` where it has none."""
    tensors = list(_tensors((args, kwargs)))
    device = next((t.device.type for t in tensors), None)
    if device is None or not torch.is_autocast_enabled(device):
        return fn(*args, **kwargs)
    floats = (t for t in tensors if t.device.type == device and t.is_floating_point())
    dtypes = ",".join([dtype_names.NAMES[t.dtype] for t in floats])
    low = dtype_names.NAMES[torch.get_autocast_dtype(device)]
    decision = _decision(name, device, low, dtypes, *regions.code_in_force())
    if decision is None:
        return fn(*args, **kwargs)
    run, out, entry = decision

    def run_whole(args: Any, kwargs: Any) -> Any:
        if run:
            dtype = dtype_names.DTYPES[run]
            args = tuple([cast_inside(arg, device, dtype) for arg in args])
            kwargs = {key: cast_inside(arg, device, dtype) for key, arg in kwargs.items()}
        with autocast(device, enabled=False):
            result = whole(*args, **kwargs)
        return cast_inside(result, device, dtype_names.DTYPES[out]) if out else result

    if entry is not None and (recorder := decision_log.current()) is not None:
        return recorder.around(entry, run_whole, args, kwargs)
    return run_whole(args, kwargs)


@dynamo.at_trace_time
def _decision(
    name: str, device: str, low: str, dtypes: str, *code: torch.dtype
) -> tuple[str | None, str | None, decision_log.Entry | None] | None:
    """Return the dtypes of the inputs and of the results, if they change; None to run the parts.

    And what a record has of it, while one is made.
    """
    policy = regions.policy_at(device, *code) or torch_table.policy(device)
    row = policy.winner(name, low)
    if row is None:
        return None
    asked = dtypes.split(",") if dtypes else []
    decision, entry = policy.apply(row, asked, low), None
    if decision_log.current() is not None:
        (spelled,) = vocabulary().ops[name].aten
        called = "torch", name, f"aten:{spelled}", low, ""
        entry = decision_log.Entry(*called, row, tuple(asked), decision, policy.name)
    if decision.rule is Rule.FORBID:
        forbid(policy, row, name, asked)
    return None if decision.rule is Rule.PARTS else (decision.run, decision.out, entry)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    # Subclasses of dict and list are containers here, as in `cast_inside`; in pytree they are not.
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner)


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
        ctx._policy = regions.policy_at(device_type, *regions.code_in_force())
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
    """Cast the float tensors of a device in a value, at any depth of containers.

    Lists, tuples and named tuples keep their type; a mapping becomes a dict, another iterable an
    iterator. Strings, bytes and what numpy defines are left alone.
    """
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
