"""`Findings`: the Inf and NaN that a loss scaler has found in the gradients of each optimizer.

An iteration has a dictionary for each optimizer, its entry. Other libraries read and write it, so
it has torch.amp's keys `stage` and `found_inf_per_device`, and once they are known: `loss`,
float32 [], 0 if no loss was lost; `optimizer`, a weak reference; `inverse`, by which the gradients
were multiplied; `skipped`, where the host knows it; and `mixed`, in trainers: whether a backward
pass added scaled gradients to unscaled ones.
"""

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.amp.grad_scaler import OptState

from polymp.backends.torch.autocast import dtype_names, regions
from polymp.backends.torch.compat import accelerators, distributed
from polymp.backends.torch.scaler import unscale
from polymp.backends.torch.scaler.device_state import DeviceState
from polymp.scaling import scale_rule
from polymp.scaling.gradient_report import (
    SMALLEST_NORMAL,
    Gradient,
    GradientReport,
    OnStuck,
    checked_on_stuck,
)
from polymp.scaling.scale_rule import ScaleRule

Entry = dict[str, Any]

Unscale = Callable[
    [torch.optim.Optimizer, torch.Tensor, torch.Tensor, bool], dict[torch.device, torch.Tensor]
]


def _refresh_per_optimizer_state() -> Entry:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def _fresh_entries() -> dict[int, Entry]:
    make: Callable[[], Entry] = _refresh_per_optimizer_state
    return defaultdict(make)


Named = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]


# Counts of Inf, NaN, zeros and subnormal numbers in gradients, and names of parameters.


class Names:
    """Names of parameters, by the tensor; keeps neither a module nor a tensor alive.

    Args:
        named: a module, or pairs of a name and a parameter; None for no names.

    Raises:
        TypeError: `named` is something else.
    """

    def __init__(self, named: Named | None = None) -> None:
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._pairs: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        if isinstance(named, torch.nn.Module):
            self._module = weakref.ref(named)
        elif named is not None:
            try:
                pairs = [(name, param) for name, param in named]
                good = all(isinstance(n, str) and isinstance(p, torch.Tensor) for n, p in pairs)
            except (TypeError, ValueError):
                good = False
            if not good:
                raise TypeError(
                    "named must be a module or pairs of a name and a parameter, such as "
                    f"model.named_parameters(); got {named!r}."
                )
            self._pairs = [(name, weakref.ref(param)) for name, param in pairs]

    def __reduce__(self) -> tuple[type["Names"], tuple[()]]:
        return Names, ()  # the parameters of a copied model are other tensors

    def of(self, optimizer: torch.optim.Optimizer) -> dict[int, str]:
        """Return a name for every parameter of the optimizer, by its id.

        Parameters without a name get the optimizer's own name, or their place in it.
        """
        names: dict[int, str] = {}
        for at, group in enumerate(optimizer.param_groups):
            own = group.get("param_names") or [
                f"group {at}, parameter {i}" for i in range(len(group["params"]))
            ]
            names |= {id(p): n for p, n in zip(group["params"], own, strict=True)}
        module = None if self._module is None else self._module()
        if module is not None:
            names |= {id(p): name for name, p in module.named_parameters()}
        return names | {id(p): name for name, ref in self._pairs if (p := ref()) is not None}


SkipOn = Literal["auto", "host", "device"]


# Checks of the arguments of a loss scaler; `Options` holds those that are not of the rule.


class Options(NamedTuple):
    """Arguments of `GradScaler` by their names."""

    on_stuck: OnStuck
    stuck_after: int
    strict: bool
    allow_fp16: bool
    check_loss: bool
    skip_on: SkipOn
    process_group: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> "Options":
        return self  # a process group cannot be copied

    def __reduce__(self) -> Any:
        if self.process_group is not None:
            raise TypeError(
                "a scaler with a process_group cannot be pickled. Save its state_dict() and load "
                "it into one that was made with the group."
            )
        return Options, tuple(self)


class Findings:
    """The entries of this iteration and of the last one.

    Args:
        state: the scaler's.
        options: the scaler's.

    Attributes:
        entries: of this iteration, by the id of the optimizer. Other libraries may replace it.
    """

    def __init__(self, state: DeviceState, options: Options) -> None:
        self.state = state
        self.options = options
        self.entries: dict[int, Entry] = _fresh_entries()
        self._before: dict[int, Entry] = {}  # those of the last iteration
        self._scaled_in: Any = None  # the entries of the iteration in which a loss was scaled last

    # The iteration.

    def note_scaled(self, scaled: bool = True) -> None:
        """Note that a loss was scaled in this iteration; with False, forget it."""
        self._scaled_in = self.entries if scaled else None

    def has_scaled(self) -> bool:
        """Return whether a loss was scaled in this iteration, outside of compiled code.

        Iterations are told apart by the object in `entries`, which the `update` of a subclass
        replaces, too.
        """
        return self._scaled_in is self.entries

    def looked(self) -> list[Entry]:
        """Return the entries of optimizers that had a gradient in this iteration."""
        return [e for e in self.entries.values() if e["found_inf_per_device"]]

    def end_iteration(self) -> None:
        """Keep the entries as those of the last iteration, and begin new ones."""
        self._before, self.entries = self.entries, _fresh_entries()

    def has_yet_to_unscale(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether gradients of parameters are scaled now: after `scale`, before `unscale_`.

        Only the optimizers that were stepped in the iteration before are known.
        """
        if not self.has_scaled():
            return False
        for key, before in self._before.items():
            now = self.entries.get(key)
            optimizer = before["optimizer"]() if "optimizer" in before else None
            if optimizer is not None and (now is None or now["stage"] is OptState.READY):
                given = {id(p) for p in parameters}
                if any(id(p) in given for p in unscale.parameters(optimizer)):
                    return True
        return False

    # One optimizer.

    def unscale(
        self, optimizer: torch.optim.Optimizer, inverse: torch.Tensor, unscale_grads: Unscale
    ) -> None:
        """Multiply the gradients by `inverse`, once in an iteration; see `look`."""
        entry = self.entries[id(optimizer)]
        if entry["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if entry["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self.look(optimizer, inverse, unscale_grads, allow_fp16=self.options.allow_fp16)
        entry["stage"] = OptState.UNSCALED

    def look(
        self,
        optimizer: torch.optim.Optimizer,
        inverse: torch.Tensor | None,
        unscale_grads: Unscale,
        *,
        allow_fp16: bool,
        divisor: torch.Tensor | None = None,
    ) -> Entry:
        """Multiply the gradients by `inverse`, if it is given, and note what all ranks found."""
        scale = self.state.tensors()[0]
        entry = self.entries[id(optimizer)]
        circle = unscale.ALONE
        if unscale.has_peers():
            params = unscale.parameters(optimizer)
            circle = unscale.circle(params, self.options.process_group)
        loss = self.state.loss if circle.everybody and self.options.check_loss else None
        start = torch.zeros_like(scale)
        by = torch.ones_like(scale) if inverse is None else inverse
        found = unscale_grads(optimizer, by, start, allow_fp16)
        divided = inverse is not None or divisor is not None
        if divided and self.state.may_be_below_one():
            # A quotient can be Inf where the scaled gradient was not.
            by = torch.ones_like(scale) if divisor is None else divisor
            for device, finding in unscale.overflows(optimizer, by).items():
                before = found.get(device)
                found[device] = finding if before is None else torch.maximum(before, finding)
        if circle.groups:
            together = start.clone()
            for finding in found.values():
                together.copy_(torch.maximum(together, finding.to(scale.device)))
            # A rank may have no loss, or no gradient, where others have: stages of a pipeline.
            bad = start.clone() if loss is None else (loss != 0).float()
            any_gradient = torch.full_like(scale, bool(found))
            unscale.agree([together, bad, any_gradient], circle.groups)
            if not found and any_gradient.item():
                found = {scale.device: together}
            for finding in found.values():
                finding.copy_(together)
            loss = None if loss is None else bad
        if not torch.compiler.is_compiling():
            regions.entries.unscaled.clear()
        entry["found_inf_per_device"] = found
        entry["loss"] = loss
        entry["optimizer"] = weakref.ref(optimizer)
        entry["inverse"] = inverse
        return entry

    def nothing_to_step(self, entry: Entry) -> bool:
        """Return whether there was no gradient to look at, so that the step does nothing."""
        if entry["found_inf_per_device"]:
            return False
        if self.options.strict:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        entry["stage"] = OptState.STEPPED
        return True

    def found(self, entry: Entry) -> torch.Tensor:
        """Return 1 if any device found Inf or NaN, else 0; float32 [], on the scale's device.

        torch's sharded scaler adds up the findings of ranks, other libraries take their mean; but
        fused kernels skip for 1 and for nothing else.
        """
        found: torch.Tensor = self.largest(entry).sign()
        return found

    def largest(self, entry: Entry) -> torch.Tensor:
        """Return the largest finding of all devices: 0, or above 0."""
        device = self.state.tensors()[0].device
        findings = list(entry["found_inf_per_device"].values())
        either: torch.Tensor = findings[0]
        if len(findings) > 1 or either.device != device:
            largest = unscale.either(unscale.moved(t, device) for t in findings)
            assert largest is not None
            either = largest
        # The findings of torch's sharded scaler have the shape [1].
        return either if either.dim() == 0 else either.reshape(())

    def latest(self, optimizer: torch.optim.Optimizer) -> Entry:
        """Return the optimizer's entry of this iteration, or else of the one before."""
        for entries in (self.entries, self._before):
            entry = entries.get(id(optimizer))
            if entry is not None and "optimizer" in entry and entry["optimizer"]() is optimizer:
                return entry
        raise RuntimeError(
            f"this scaler has not looked at the gradients of this {type(optimizer).__name__} in "
            "this iteration or the last: call step(optimizer) or unscale_(optimizer) first."
        )

    def found_inf(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """`GradScaler.found_inf`."""
        entry = self.latest(optimizer)
        if not entry["found_inf_per_device"]:
            return torch.tensor(False)
        found: torch.Tensor = self.found(entry) != 0
        return found

    # All of them.

    def report(self, names: Names, *, last: bool) -> GradientReport:
        """Report on the gradients; if asked for, with optimizers of the `last` iteration."""
        rows = []
        for entry in {**(self._before if last else {}), **self.entries}.values():
            optimizer = entry["optimizer"]() if "optimizer" in entry else None
            if optimizer is not None:
                inverse = entry["inverse"]
                one = torch.ones_like(self.state.tensors()[0])
                factor = one if inverse is None else inverse.reciprocal()
                if inverse is None and "grad_scale" in entry and entry["found_inf_per_device"]:
                    # torch's fused optimizers leave true gradients, if they have stepped.
                    factor = torch.where(self.found(entry) != 0, one, entry["grad_scale"])
                rows += gradients(optimizer, names.of(optimizer), factor)
        state = self.state.read()
        return GradientReport(self.state.rule, state, tuple(rows))


def gradients(
    optimizer: torch.optim.Optimizer, names: dict[int, str], factor: torch.Tensor
) -> list[Gradient]:
    """Count the values of each gradient of the optimizer. Waits for the device, once."""
    rows, counts = [], []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                grad = distributed.local(param.grad)
                rows.append((names[id(param)], tuple(distributed.local(param).shape)))
                counts.append(unscale.moved(_counts(grad, factor), factor.device))
    if not counts:
        return []
    table = torch.stack(counts).tolist()
    return [Gradient(*row, *numbers) for row, numbers in zip(rows, table, strict=True)]


@torch.no_grad()
def _counts(grad: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Count Inf, NaN, zero and subnormal values; int64 [4]."""
    absent = 0
    if grad.layout is not torch.strided:  # absent elements are zeros
        values = grad.coalesce().values() if grad.layout is torch.sparse_coo else grad.values()
        absent, grad = grad.numel() - values.numel(), values
    size = grad.abs()  # of a complex number, its distance from 0
    wide = size if size.dtype is torch.float64 else size.float()
    tiny = wide * unscale.moved(factor, wide.device) < SMALLEST_NORMAL
    zero = wide == 0
    kinds = (wide.isinf(), wide.isnan(), zero, tiny & ~zero)
    return torch.stack([k.sum() for k in kinds]) + torch.tensor(
        [0, 0, absent, 0], device=wide.device
    )


def acts_on(device: object, dtype: object, enabled: bool) -> bool:
    """Return whether a scaler with these arguments is enabled."""
    if not isinstance(device, (str, torch.device)):
        raise TypeError(
            f"device must be a name such as 'cuda' or 'cpu', got {device!r}. The first scale "
            "is GradScaler(device, init_scale)."
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        dtype = dtype_names.of(dtype, "GradScaler(): dtype")
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be the region's low dtype, a float dtype, got {dtype}.")
    acts = enabled and dtype in (None, torch.float16)
    if acts and device == "cuda" and accelerators.cuda_missing():
        warnings.warn(
            "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.",
            stacklevel=3,
        )
        return False
    return acts


def checked_rule(rule: ScaleRule) -> ScaleRule:
    """Check the constants of a rule; the errors are torch.amp's where torch.amp has one."""
    if scale_rule.number("growth_factor", rule.growth) <= 1.0:
        raise AssertionError("The growth factor must be > 1.0.")
    if scale_rule.number("backoff_factor", rule.backoff) >= 1.0:
        raise AssertionError("The backoff factor must be < 1.0.")
    return scale_rule.checked(rule)


def checked(options: Options) -> Options:
    """Check the options."""
    if options.skip_on not in ("auto", "host", "device"):
        raise ValueError(f"skip_on must be 'auto', 'host' or 'device', got {options.skip_on!r}.")
    checked_on_stuck(options.on_stuck, options.stuck_after)
    unscale.check_group(options.process_group)
    return options
