"""`autocast`: regions in which every op runs in the dtype that suits it.

The drop-in for `torch.autocast`. Arguments are checked here, with torch.amp's messages; `regions`
enters and leaves regions, and `policies/` has the ops that they change.
"""

# The annotations below are not evaluated: `P.args` is a new object each time, and torch.compile
# would guard on the one that it saw.
from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from polymp.backends.torch.autocast import dtype_names, kernel_registry, regions, torch_table
from polymp.backends.torch.compat import accelerators, dynamo
from polymp.errors import PolicyError
from polymp.rules import policy_files
from polymp.rules.policy import Policy, Region
from polymp.rules.row import LOW

PolicyLike = policy_files.Source
P = ParamSpec("P")
R = TypeVar("R")
# Of torch as it was imported: programs may put polymp's function in its place.
_is_available = torch.amp.is_autocast_available

_DTYPES = *LOW, "float32", "float64"  # in the last two, torch warns, and opens no region


def is_autocast_available(device_type: str) -> bool:
    """Return whether torch has autocast for a device type, present on this machine or not.

    Args:
        device_type: the `tensor.device.type`: "cpu", "cuda", "xpu", "mps", ...

    Returns:
        True if regions can be opened for the device type.

    Raises:
        RuntimeError: torch knows no such device type.
    """
    return _is_available(device_type)


class autocast(regions.PreparedRegion):  # the name is torch's
    """A region of mixed precision, as a context manager or a decorator.

        with autocast("cpu", dtype=torch.bfloat16):
            loss = loss_fn(model(x), y)          # each op in the dtype that the policy names
        loss.backward()                          # outside: backward runs in the forward's dtypes

    As a decorator it wraps functions, generators and coroutines; a generator or coroutine is in
    the region while it runs and out of it while it is suspended.

    One object may be entered any number of times: again inside itself, recursively, and by
    several threads at once. State is per thread; a new thread starts outside of regions.

    Args:
        device_type: the devices whose ops the region changes: "cpu", "cuda", "xpu", "mps", ...
        dtype: the low dtype, or a name of it such as "bfloat16", "bf16" or "fp16"; None takes
            torch's default for the device (cpu bfloat16, cuda float16), or the dtype of the region
            that the object is made in; bfloat16 for a policy with rule fp8.
        enabled: False makes a subregion in which ops run in the dtypes of their inputs.
        cache_enabled: keep the casts of parameters until the region ends; None means yes.
        policy: which ops run in which dtype: a `Policy`, a shipped policy's name, the path of a
            TOML file, or plain data. None is torch's own table for the device, at native speed.

    Raises:
        ValueError: `device_type` is not a string, or `dtype` is no name of a float dtype.
        TypeError: `dtype` is neither a dtype of torch nor a string, or `enabled` no bool.
        RuntimeError: torch has no autocast for `device_type`, or the GPU cannot do bfloat16.
        PolicyError: the policy cannot be read, or has a row that torch cannot follow.

    Warns:
        UserWarning: CUDA is asked for and absent, or `dtype` is not supported; the region is then
            disabled, as in torch.amp.

    Source:
        torch.amp, "Automatic Mixed Precision package", `torch.autocast`.
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | str | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: PolicyLike | None = None,
    ) -> None:
        if not isinstance(device_type, str):
            raise ValueError(f"Expected `device_type` of type `str`, got: `{type(device_type)}`")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            dtype = dtype_names.of(dtype, "autocast(): dtype", _DTYPES)
        self.device = device_type
        around = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        if cache_enabled is None:
            traced = is_dynamo_compiling()
            cache_enabled = torch.is_autocast_cache_enabled() if traced else regions.wants_cache()
        self._cache_enabled = cache_enabled
        self.fast_dtype: torch.dtype
        ticket, self._enabled, self.fast_dtype = _prepare(
            device_type, dtype, around, enabled, self._cache_enabled, policy
        )
        super().__init__(ticket)

    def __repr__(self) -> str:
        policy = regions.prepared[self._ticket][0].policy
        shown = [repr(self.device), f"dtype={self.fast_dtype}", f"enabled={self._enabled}"]
        shown += [] if policy is None else [f"policy={policy.name!r}"]
        return f"{type(self).__name__}({', '.join(shown)})"

    def __getstate__(self) -> dict[str, Any]:
        region = regions.prepared[self._ticket][0]  # the ticket is a name of this process
        return self.__dict__ | {"_ticket": region, "_traced": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        region = state["_ticket"]
        kernel_registry.prepare(region)
        self.__dict__.update(state, _ticket=regions.ticket(region))

    def __call__(self, func: Callable[P, R]) -> Callable[P, R]:
        """Wrap a function so that its body runs in the region.

        Args:
            func: a function, generator or coroutine function.

        Returns:
            A function of the same kind and signature.

        Raises:
            TypeError: `func` is not callable, or an async generator function.
        """
        if not callable(func):
            raise TypeError(
                f"autocast()(func) requires a callable, but got {type(func).__name__}. "
                f"Did you mean to use autocast as a context manager? For example:\n"
                f"    with torch.autocast(device_type=...):\n"
                f"        output = model(input)"
            )
        wrapper = _wrapped(self, func)
        # torch.jit reads this name; as `wrapper.__script...` Python would mangle it.
        reason = "@autocast() decorator is not supported in script mode"
        setattr(wrapper, "__script_unsupported", reason)
        return wrapper


@dynamo.at_trace_time
def _prepare(
    device: str,
    dtype: torch.dtype | None,
    around: torch.dtype,
    enabled: bool,
    cache: bool,
    policy: PolicyLike | None,
) -> tuple[str, bool, torch.dtype]:
    """Check the arguments and prepare their region; return its ticket, enabled, and its dtype."""
    if not is_autocast_available(device):
        raise RuntimeError(f"User specified an unsupported autocast device_type '{device}'")
    # Without a dtype it is that of the region around, and bfloat16 for a policy with rule fp8.
    if not isinstance(around, torch.dtype):
        raise TypeError(f"autocast's dtype must be a torch.dtype, got {around!r}")
    if isinstance(policy, tuple) and all(isinstance(x, torch.dtype) for x in policy):
        policy = regions.policy_at(device, *policy)  # of `custom_fwd`: dynamo takes no object here
    loaded = None if policy is None else policy_files.load(policy)
    if dtype is None:
        dtype = torch.bfloat16 if loaded is not None and loaded.fp8 else around
    if loaded is not None and loaded.scopes:
        raise PolicyError(
            f"policy {loaded.name!r} has rules for modules ({', '.join(loaded.scopes)}), whose "
            "paths a region does not see. Give it to polymp.torch.scoped(model, policy), and to "
            "the region, for what runs outside of the model, policy.at('') or none."
        )
    enabled = _supported(device, dtype, enabled)
    if not isinstance(enabled, bool):
        kind = type(enabled)
        name = f"numpy.{kind.__name__}" if kind.__module__ == "numpy" else kind.__name__
        raise TypeError(
            f"set_autocast_enabled(): argument 'enabled' (position 2) must be bool, not {name}. "
            "Write enabled=bool(...), or policy=... to name a policy."
        )
    return _ready(device, dtype, enabled, bool(cache), loaded), enabled, dtype


@functools.cache
def _ready(
    device: str, dtype: torch.dtype, enabled: bool, cache: bool, policy: Policy | None
) -> str:
    """Prepare a region, once, and return its ticket."""
    kind = device.partition(":")[0]  # as in torch.amp, "cuda:0" means every GPU
    region = Region("torch", kind, enabled, dtype_names.NAMES[dtype], cache, policy)
    kernel_registry.prepare(region)
    return regions.ticket(region)


def _supported(device: str, dtype: torch.dtype, enabled: bool) -> bool:
    """Return `enabled`; False, with torch.amp's warning, where the dtype is not supported."""
    private = None if device in torch_table.DEVICES else accelerators.private_dtypes(device)
    dtypes = [torch.bfloat16, torch.float16] if private is None else private
    if not enabled:
        return enabled
    if device == "cuda":
        if accelerators.cuda_missing():
            warnings.warn(
                "CUDA is not available or torch_xla is imported. Disabling autocast.", stacklevel=4
            )
            return False
        if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
            raise RuntimeError(
                "Current CUDA Device does not support bfloat16. Please switch dtype to float16."
            )
    elif dtype not in dtypes:
        name = device.upper() if private is None else device
        warnings.warn(
            f"In {name} autocast, but the target dtype is not supported. Disabling autocast.\n"
            f"{name} Autocast only supports dtypes of {', '.join(map(str, dtypes))} currently.",
            stacklevel=4,
        )
        return False
    return enabled


# Functions of all kinds that run in a region: plain ones, generators, coroutines.


def _wrapped(region: autocast, func: Callable[P, Any]) -> Callable[P, Any]:
    """Wrap a function so that its body runs in a region; a generator's step by step."""

    @functools.wraps(func)
    def function(*args: P.args, **kwargs: P.kwargs) -> Any:
        with regions.CompiledRegion(region._ticket) if is_dynamo_compiling() else region:
            return func(*args, **kwargs)

    @functools.wraps(func)
    def generator(*args: P.args, **kwargs: P.kwargs) -> Any:
        return (yield from _steps(region, func(*args, **kwargs)))

    @functools.wraps(func)
    async def coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
        return await types.coroutine(_steps)(region, func(*args, **kwargs))

    if inspect.isasyncgenfunction(func):
        name = getattr(func, "__qualname__", func)
        raise TypeError(
            f"autocast()(func) cannot wrap the async generator {name!r}. Write "
            "`with autocast(...):` in it, around what computes."
        )
    if inspect.iscoroutinefunction(func):
        return coroutine
    return generator if inspect.isgeneratorfunction(func) else function


def _steps(region: autocast, inner: Any) -> Generator[Any, Any, Any]:
    """Run a generator or coroutine to its end, each step in the region."""
    step = functools.partial(inner.send, None)
    while True:
        try:
            with region:
                value = step()
        except StopIteration as end:
            return end.value
        try:
            sent = yield value
        except GeneratorExit:
            with region:
                inner.close()
            raise
        except BaseException as error:
            step = functools.partial(inner.throw, error)
        else:
            step = functools.partial(inner.send, sent)
