"""The region of a plugin and its loss scaler, which both plugins have."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision as Plain

from polymp.backends.torch.autocast.api import PolicyLike
from polymp.backends.torch.scaler import trainer_steps
from polymp.errors import PolicyError
from polymp.rules import policy_files
from polymp.rules.policy import Policy
from polymp.torch import GradScaler
from polymp.torch._trainers import RegionSettings, check_scaler

_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "32-true": None}
# Names of Lightning's, and of other libraries', for these modes.
_ALIASES = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-true", torch.bfloat16), "bf16-mixed"),
    **dict.fromkeys(("16", 16, "fp16", "float16", "16-true", torch.float16), "16-mixed"),
    **dict.fromkeys(("32", 32, "fp32", "float32", torch.float32), "32-true"),
}


class Region(Plain):
    """The region of a plugin and its loss scaler, which are made once the device is known.

    The first base of a plugin. The other base is the one plugin of Lightning that its FSDP strategy
    accepts, which converts modules and batches to float32. Here they stay as they are.
    """

    convert_module = Plain.convert_module
    convert_input = Plain.convert_input
    tensor_init_context = Plain.tensor_init_context
    module_init_context = Plain.module_init_context

    def __init__(
        self, precision: str, policy: PolicyLike | None, scaler: GradScaler | None
    ) -> None:
        super().__init__("32-true")  # type: ignore[call-arg]
        name = type(self).__name__
        if precision not in _DTYPES:
            meant = _ALIASES.get(precision, "bf16-mixed")
            given = "" if _DTYPES[meant] is None else ", policy=..."
            raise ValueError(
                f"{name}({precision!r}): precision must be 'bf16-mixed', '16-mixed' or '32-true'. "
                f"Write {name}({meant!r}{given}). Lightning's other modes work without this plugin."
            )
        self.policy = _for_region(policy, name, precision)
        asked, half = f"{name}({precision!r})", precision == "16-mixed"
        check_scaler(scaler, asked, half, f"{name}('16-mixed', scaler=scaler)")
        self.precision: Any = precision
        self.scaler: Any = scaler
        self.device: str | None = None
        self._settings: RegionSettings | None = None

    def _begin(self, device: str) -> None:
        """Make the region, and the scaler if none was given, once the device type is known."""
        if device == self.device:
            return
        self.device, dtype = device, _DTYPES[self.precision]
        if dtype is not None:
            name = type(self).__name__
            line = f"{name}({self.precision!r}, policy=...)"
            self._settings = RegionSettings(device, dtype, self.policy, name, line)
            self._autocast = self._settings.region()
        if dtype is torch.float16 and self.scaler is None:
            self.scaler = GradScaler(device)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the region; a context that does nothing for 32-true, which has no policy."""
        if self.device is None:
            self._find_device()
        if self._settings is None:
            return nullcontext()
        self._settings.check()
        return self._autocast

    def _find_device(self) -> None:
        """Call `_begin`, or raise: the region or the scaler is needed, and the device not known."""
        raise NotImplementedError

    @property
    def mixed_precision_config(self) -> Any:
        """The dtypes that FSDP casts to; None with a policy, which decides about every cast."""
        return super().mixed_precision_config if self.policy is None else None  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; {} without one."""
        trainer_steps.update_pending(self.scaler)
        return super().state_dict()


def _for_region(policy: PolicyLike | None, name: str, precision: str) -> Policy | None:
    """Return the policy of a region; raises if it has rules for modules, or there is no region."""
    if policy is None:
        return None
    loaded = policy_files.load(policy)
    if _DTYPES[precision] is None:
        raise ValueError(
            f"{name}({precision!r}) opens no region that policy {loaded.name!r} could act in. "
            f"Write {name}('bf16-mixed', policy=...), or {name}({precision!r}) without a policy."
        )
    if loaded.scopes:
        raise PolicyError(
            f"policy {loaded.name!r} has rules for modules ({', '.join(loaded.scopes)}), whose "
            "paths a region does not see. Write polymp.torch.scoped(model, policy), and then "
            f"plugins=[{name}({precision!r})]."
        )
    return loaded
