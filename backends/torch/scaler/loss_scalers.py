"""`LossScalers`: one scale for each loss of a model, with one optimizer.

Where one loss makes gradients that are much larger than another's, one scale cannot suit both. Each
loss goes backward by itself, scaled with its own scale; its gradients are unscaled, and the true
gradients add up.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from polymp.backends.torch.scaler import closure_step, device_skip, loss_gradients, unscale
from polymp.backends.torch.scaler.findings import Entry, Findings
from polymp.backends.torch.scaler.grad_scaler import GradScaler, OptState
from polymp.backends.torch.scaler.properties import findings_of
from polymp.scaling import scale_rule
from polymp.scaling.state_dict import from_state_dict

_RESERVED = ("retain_graph", "skipped")  # an argument of `backward`, an entry of `state_dict`


class LossScalers(Mapping[str, GradScaler]):
    """A loss scale for each loss: a mapping from the names of losses to their `GradScaler`s.

        scalers = LossScalers("cuda", losses=("content", "style"))
        with autocast("cuda", dtype=torch.float16):
            content, style = losses_of(model(x), y)
        optimizer.zero_grad()
        scalers.backward(optimizer, content=content, style=style)   # true gradients, added up
        scalers.step(optimizer)      # skipped if those of any loss have Inf or NaN
        scalers.update()             # each scale by what was found for its own loss

    For one scale for each optimizer, make a `GradScaler` for each.

    Args:
        device: the device of the scales.
        losses: names of the losses, each once.
        options: arguments of `GradScaler`, the same for each loss.

    Raises:
        ValueError: there is no name, a name is given twice, or is "retain_graph" or "skipped".
        TypeError: a name is no string, or `GradScaler` has no such argument.
    """

    def __init__(self, device: str = "cuda", *, losses: Iterable[str], **options: Any) -> None:
        names = (losses,) if isinstance(losses, str) else tuple(losses)
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"losses must be names, got {losses!r}.")
        if not names or len(set(names)) < len(names) or set(names) & set(_RESERVED):
            raise ValueError(
                "losses must be one name or more, each once, and none of "
                f"{', '.join(map(repr, _RESERVED))}; got {losses!r}."
            )
        named = options.get("named")
        if isinstance(named, Iterable) and not isinstance(named, torch.nn.Module):
            options["named"] = list(named)  # each scaler goes through it
        self._scalers = {name: GradScaler(device, **options) for name in names}
        for name, findings in self._findings().items():
            findings.options = findings.options._replace(loss=name)
        self._skipped: int | torch.Tensor = 0  # iterations with a skip
        self._found: torch.Tensor | None = None  # 1 if this one has a skip, else 0; float32 []

    def __getitem__(self, name: str) -> GradScaler:
        if name not in self._scalers:
            raise KeyError(f"no loss {name!r}; there are {self._names()}")
        return self._scalers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scalers)

    def __len__(self) -> int:
        return len(self._scalers)

    def _names(self) -> str:
        return ", ".join(map(repr, self._scalers))

    def _findings(self) -> dict[str, Findings]:
        """Return the findings of each loss's scaler; of none, if disabled."""
        return {n: findings_of(scaler) for n, scaler in self.items() if scaler.is_enabled()}

    def is_enabled(self) -> bool:
        """Return False if every method passes through."""
        return any(scaler.is_enabled() for scaler in self.values())

    def backward(
        self,
        optimizer: torch.optim.Optimizer,
        /,
        *,
        retain_graph: bool = False,
        **losses: torch.Tensor,
    ) -> None:
        """Add the true gradients of the losses to those of the optimizer's parameters.

        Other parameters get no gradients. Called again before `step`, it accumulates. A loss may be
        left out; its scale then stays as it is. Losses may share a graph. The host does not wait.

        Args:
            optimizer: whose parameters get gradients.
            retain_graph: True keeps the graphs for another `backward`.
            losses: float scalars by the names of the losses; not scaled.

        Raises:
            KeyError: there is no loss of that name.
            TypeError: no loss is given, or one is not a tensor.
            RuntimeError: the optimizer has stepped since `update`.
            ValueError: a gradient is float16 and `allow_fp16` is False.
        """
        scalers = {name: self[name] for name in losses}
        if not losses:
            raise TypeError(f"backward() needs a loss by its name: one of {self._names()}.")
        for name, loss in losses.items():
            if not isinstance(loss, torch.Tensor):
                raise TypeError(f"the loss {name!r} must be a tensor, got {loss!r}.")
        if any(e["stage"] is OptState.STEPPED for e in self._entries(optimizer).values()):
            raise RuntimeError(
                f"backward() was called after this {type(optimizer).__name__}'s step(): call "
                "update() first."
            )
        params = [p for p in unscale.parameters(optimizer) if p.requires_grad]
        for left, (name, loss) in zip(range(len(losses))[::-1], losses.items(), strict=True):
            before = [p.grad for p in params]
            try:
                for p in params:
                    p.grad = None
                scaled = scalers[name].scale(loss)
                torch.autograd.backward(
                    scaled, retain_graph=retain_graph or left > 0, inputs=params
                )
                if scalers[name].is_enabled():
                    loss_gradients.unscale_new(scalers[name], optimizer)
            except BaseException:  # what was there before is not lost, and nothing half done stays
                for p, grad in zip(params, before, strict=True):
                    p.grad = grad
                raise
            for p, grad in zip(params, before, strict=True):
                loss_gradients.add(p, grad)

    def _entries(self, optimizer: torch.optim.Optimizer) -> dict[str, Entry]:
        """Return the optimizer's entry of this iteration in each loss's scaler, by the loss."""
        return {
            name: findings.entries[id(optimizer)]
            for name, findings in self._findings().items()
            if id(optimizer) in findings.entries
        }

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call `optimizer.step(*args, **kwargs)`; skip it if gradients of any loss are not finite.

        The host waits once, where it does in `GradScaler.step`.

        Args:
            optimizer: the optimizer.
            args: of `optimizer.step`; no closure.
            kwargs: likewise.

        Returns:
            The result of `optimizer.step`; None if the host skipped it.

        Raises:
            RuntimeError: no `backward` came before, or `step` was called already.
            TypeError: a closure is given.
        """
        if not self.is_enabled():
            return optimizer.step(*args, **kwargs)
        if closure_step.closure_of(args, kwargs) is not None:
            raise TypeError("LossScalers.step() takes no closure; GradScaler.step() does.")
        entries = self._entries(optimizer)
        if not entries:
            raise RuntimeError(
                f"step() was called before this {type(optimizer).__name__}'s backward(): call "
                f"backward(optimizer, ...) with one or more of {self._names()}."
            )
        if any(entry["stage"] is OptState.STEPPED for entry in entries.values()):
            raise RuntimeError("step() has already been called since the last update().")
        findings = self._findings()
        lead, entry = next(iter(entries.items()))
        looked = {name: e for name, e in entries.items() if e["found_inf_per_device"]}
        if looked:
            loss_gradients.look_at_sums(optimizer, findings, looked)
        found_by = [findings[name].found(e) for name, e in looked.items()]
        found = unscale.either(found_by)
        on_device = getattr(optimizer, "_step_supports_amp_scaling", False) or device_skip.wanted(
            findings[lead].options.skip_on, optimizer
        )
        if found is None or on_device:
            own = entry["found_inf_per_device"]
            entry["found_inf_per_device"] = {} if found is None else {found.device: found}
            try:
                result = self[lead].step(optimizer, *args, **kwargs)
            finally:
                entry["found_inf_per_device"] = own
        else:
            for e, finding in zip(looked.values(), torch.stack(found_by).tolist(), strict=True):
                e["skipped"] = bool(finding)
            skip = any(e["skipped"] for e in looked.values())
            result = None if skip else optimizer.step(*args, **kwargs)
        for e in entries.values():
            e["stage"] = OptState.STEPPED
        if found is not None:
            self._found = found if self._found is None else torch.maximum(self._found, found)
        return result

    def update(self) -> None:
        """Set each scale for the next iteration by what was found for its own loss.

        A loss that had no `backward` in this iteration, or one without gradients, keeps its scale
        and its counts.

        Raises:
            AssertionError: no loss gave the optimizers a gradient.
            RuntimeError: no `backward` came before.
            StuckError: `on_stuck` is "raise", and a loss was skipped once too often in a row; all
                scales are set then.
        """
        if not self.is_enabled():
            return
        findings = self._findings()
        if not any(f.entries for f in findings.values()):
            raise RuntimeError(
                "update() was called before backward(): call backward(optimizer, ...) with one or "
                f"more of {self._names()}."
            )
        if self._found is not None:
            self._skipped = self._skipped + (self._found != 0).to(torch.int32)
            self._found = None
        raised: list[Exception] = []
        idle = not any(f.looked() for f in findings.values())
        for name, f in findings.items():
            try:
                (self[name].update if idle or f.looked() else f.end_iteration)()
            except Exception as error:  # the others are updated all the same
                raised.append(error)
        if raised:
            raise raised[0]

    def found_inf(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Return whether Inf or NaN was last found for the optimizer, in any loss.

        For one loss alone, ask its own scaler. The host waits when the tensor is read.

        Args:
            optimizer: the optimizer.

        Returns:
            bool [].

        Raises:
            RuntimeError: there was no `backward` in this iteration or the last.
        """
        return self._any(optimizer, "found_inf")

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Return whether the last `step` of the optimizer was skipped.

        Args:
            optimizer: the optimizer, after its `step`.

        Returns:
            bool [].

        Raises:
            RuntimeError: there was no `step` in this iteration or the last.
        """
        return self._any(optimizer, "step_skipped")

    def _any(self, optimizer: torch.optim.Optimizer, question: str) -> torch.Tensor:
        asked = list(self._entries(optimizer)) or [
            name for name, findings in self._findings().items() if findings.knows(optimizer)
        ]
        either = unscale.either(
            getattr(self[name], question)(optimizer).float() for name in asked or self
        )
        assert either is not None
        return either != 0

    @property
    def skipped_steps(self) -> torch.Tensor:
        """The number of iterations so far in which an optimizer was skipped; int32 []."""
        return torch.as_tensor(self._skipped, dtype=torch.int32)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each loss's scaler by its name, and `skipped`; {} if disabled."""
        if not self.is_enabled():
            return {}
        states: dict[str, Any] = {name: scaler.state_dict() for name, scaler in self.items()}
        return states | {"skipped": int(self._skipped)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; does nothing if disabled. Nothing is changed if it raises.

        Args:
            state_dict: from `state_dict`.

        Raises:
            KeyError: the names of the losses are others, or an entry is missing.
            TypeError: a state is no dictionary, or an entry no number.
            ValueError: an entry is out of its range.
        """
        if not self.is_enabled():
            return
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"the state of LossScalers must be a dictionary, got {state_dict!r}.")
        if set(state_dict) - {"skipped"} != set(self):
            there = ", ".join(map(repr, state_dict)) or "nothing"
            raise KeyError(f"the state must have the losses {self._names()}; it has {there}")
        for name, findings in self._findings().items():
            try:
                from_state_dict(state_dict[name], findings.state.rule)
            except (KeyError, TypeError, ValueError) as error:
                error.add_note(f"in the state of the loss {name!r}")
                raise
        skipped = scale_rule.number("skipped", state_dict.get("skipped", 0), whole=True)
        if not 0 <= skipped < 2**31:
            raise ValueError(f"skipped must be from 0 to {2**31 - 1}, got {skipped!r}.")
        for name, scaler in self.items():
            scaler.load_state_dict(state_dict[name])
        self._skipped = int(skipped)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_skipped": int(self._skipped)}
