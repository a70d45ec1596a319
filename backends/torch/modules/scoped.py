"""`scoped`: rules by module path. Every module of a model runs under the policy of its path.

The call of a module puts `policy.at(path)` in force for as long as it runs. Regions and the casts
of ops are in `autocast`.
"""

import functools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch.compiler import is_dynamo_compiling

from polymp.backends.torch.autocast import (
    kernel_registry,
    region_casts,
    regions,
    torch_table,
)
from polymp.backends.torch.autocast.api import PolicyLike
from polymp.backends.torch.autocast.regions import NONE, SCOPE, Code, codes
from polymp.backends.torch.compat import dynamo, modes
from polymp.backends.torch.modules import subclass
from polymp.code_origin import outside
from polymp.errors import PolicyError, PolicyWarning, brief
from polymp.rules import policy_files, scopes
from polymp.rules.policy import Policy


class ModuleScope:
    """The scope of a module; one object for each policy."""

    def __init__(self, policy: Policy) -> None:
        for device in torch_table.DEVICES:
            kernel_registry.install(policy, device)
        self.policy = policy
        self.code: regions.Code = regions.of_scope(policy)  # the policy's

    def __reduce__(self) -> tuple[Any, ...]:
        return _module_scope, (self.policy,)  # codes are of one process


@cache
def _module_scope(policy: Policy) -> ModuleScope:
    return ModuleScope(policy)


class Scoped(subclass.Extension):
    """A module's class, in a scoped model."""

    KEY: ClassVar[str] = "_polymp_scope"

    def _call_impl(self, *args: object, **kwargs: object) -> Any:
        """Call the module, also by a `__call__` that was bound before."""
        module_scope = self.__dict__.get(Scoped.KEY)
        if module_scope is None:
            above: Any = super() if isinstance(self, Scoped) else self  # bound, and then removed
            return above._call_impl(*args, **kwargs)
        code, outer = module_scope.code, regions.code_in_force()
        if code == outer:
            return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        try:
            enter(code)
            return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            leave(outer)


class Scoping(subclass.Handle):
    """The handle that `scoped` returns: `remove()` takes the scopes off the model again.

    Args:
        policy: as given to `scoped`.
        modules: of the model.
        paths: of the modules.

    Attributes:
        policy: likewise.
        unmatched: patterns of the policy that match no module of the model, such as typos.
    """

    _call = "scoped(model, policy)"

    def __init__(self, policy: Policy, modules: Iterable[nn.Module], paths: Iterable[str]) -> None:
        super().__init__(Scoped, modules)
        self.policy = policy
        matched = {p for path in paths for _, p in scopes.ranked(policy.scopes, path)}
        self.unmatched: tuple[str, ...] = tuple(sorted(set(policy.scopes) - matched))

    def __repr__(self) -> str:
        return f"Scoping({self.policy.name!r}, {len(self._modules)} modules)"


@contextmanager
def scoped_anew(models: Sequence[nn.Module], policy: Policy) -> Iterator[None]:
    """Replace the scopes of models by those of a policy, or by none, for the length of a block."""
    modules = [module for model in models for module in model.modules()]
    were = [(m, m.__dict__[Scoped.KEY]) for m in modules if Scoped.KEY in m.__dict__]
    with ExitStack() as stack:
        for module, place in were:
            subclass.restore(module, Scoped)
            stack.callback(subclass.extend, module, Scoped, place)
        if policy.scopes:
            stack.enter_context(_scoped(models, policy))
        yield


def scoped(model: nn.Module, policy: PolicyLike) -> Scoping:
    """Have every module of a model run under the policy that holds at its path.

        scoped(model, polymp.policy("amp").override(scopes={"*.lm_head": {"linear": "fp32"}}))
        with autocast("cpu", torch.bfloat16):
            logits = model(ids)              # lm_head in float32, the rest as amp says

    While a module is called, `policy.at(path)` is in force in every enabled region, polymp's or
    torch.amp's, in place of the region's own policy; outside of regions nothing changes. A region
    with a policy that is entered inside a module replaces it in turn, up to the next module's call.

    A path is the module's name in `model.named_modules()`, the first for a module with several. The
    model is changed in place: the class of each module becomes a subclass of the same name. Scope a
    model before it is wrapped, because a wrapper puts its own name before the paths.

    Code outside of module calls has no path: parameters that a parent reads itself, as
    nn.MultiheadAttention does with `out_proj`, and `module.forward(...)`.

    Args:
        model: any module; modules added to it later are not scoped.
        policy: a `Policy`, a shipped policy's name, the path of a TOML file, or plain data.

    Returns:
        A handle, not the model.

    Raises:
        TypeError: the model is no module, or a submodule cannot be scoped.
        PolicyError: the policy cannot be read, has a row that torch cannot follow, or the model, or
            a part of it, is scoped already.

    Warns:
        PolicyWarning: patterns of the policy match no module of the model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"scoped() takes a torch.nn.Module and a policy, not {brief(model)}.")
    return _scoped([model], policy_files.load(policy))


def _scoped(models: Sequence[nn.Module], policy: Policy) -> Scoping:
    """Put the scopes of a policy on models, and warn of those that none of them has."""
    named = [item for model in models for item in model.named_modules()]
    paths = [path for path, _ in named]
    places = dict[nn.Module, ModuleScope]()
    for path, module in named:
        what = subclass.check(module, path, "scoped")
        if module._compiled_call_impl is not None:
            raise TypeError(f"{what} is compiled by its own compile(). Scope it before that.")
        if Scoped.KEY in module.__dict__:
            name = module.__dict__[Scoped.KEY].policy.name
            raise PolicyError(
                f"{what} is scoped already, by policy {name!r}. "
                "Take that off first, by remove() of the handle that scoped() returned."
            )
        places.setdefault(module, _module_scope(policy.at(path)))
    scoping = Scoping(policy, places, paths)
    try:
        for module, place in places.items():
            subclass.extend(module, Scoped, place)
        if scoping.unmatched:
            hints = [f"{p!r}: {subclass.hint(p, models)}" for p in scoping.unmatched]
            kinds = " or ".join(type(model).__name__ for model in models)
            warnings.warn(
                f"scoped(): policy {policy.name!r} has rules for paths that no module of {kinds} "
                f"has. {' '.join(hints)}",
                PolicyWarning,
                stacklevel=outside(),
            )
        return scoping
    except BaseException:  # without a handle, nobody could take the scopes off
        scoping.remove()
        raise


# The scope of a module: its policy in force while it runs, whatever the device.


@dynamo.no_frame
def enter(code: Code) -> None:
    """Put a module's policy in force in this thread, whatever the device."""
    # It holds in every enabled region, the one around and those entered inside that have no policy
    # of their own. Region, dtype and cache stay as they are.
    if is_dynamo_compiling():
        _allow()
        _put(True, *code)
        return
    if modes.are_functions_watched():
        _refuse_export(code)
    regions.write_code(code)


@dynamo.no_frame
def leave(outer: Code) -> None:
    """Put the policies of a code back in force: those from before a scope was entered."""
    if is_dynamo_compiling():
        _put(False, *outer)
        return
    regions.write_code(outer)
    if outer == NONE and not regions.local.thread.frames:
        region_casts.end(regions.local.thread)  # the end of a region of torch's own is not seen


def _put(entering: bool, *code: torch.dtype) -> None:
    """Enter or leave a scope, as a call in a graph."""
    if entering:
        _refuse_export(code)
        dynamo.after_tracing(functools.partial(_restore, code, regions.code_in_force()))
    regions.write_code(code)


def _restore(code: Code, outer: Code) -> None:
    """Restore the policies from before a scope, if the trace was given up inside of it."""
    if regions.code_in_force() == code:
        regions.write_code(outer)


def _refuse_export(code: Code) -> None:
    if dynamo.export_modes():
        name = codes.policies[code][SCOPE].name
        raise PolicyError(
            f"torch.export cannot record the scopes of policy {name!r}. Export with "
            "polymp.torch.bake(model, inputs), which writes the casts out; or without the scopes, "
            "after remove() of the handle that scoped() returned."
        )


@dynamo.at_trace_time
def _allow() -> None:
    dynamo.in_graph(_put)
