"""The region of a plugin and its loss scaler, which both plugins have."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from polymp.backends.torch.autocast.api import PolicyLike
from polymp.rules.policy import Policy
from polymp.torch import GradScaler, autocast
from polymp.torch._trainers import check_scaler, refuse_outer_region, region_policy

_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "32-true": None}
# Names of Lightning's, and of other libraries', for these modes.
_ALIASES = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-true", torch.bfloat16), "bf16-mixed"),
    **dict.fromkeys(("16", 16, "fp16", "float16", "16-true", torch.float16), "16-mixed"),
    **dict.fromkeys(("32", 32, "fp32", "float32", torch.float32), "32-true"),
}


class Region:
    """The region of a plugin and its loss scaler, which are made once the device is known."""

    precision: Any
    scaler: Any

    def configure(
        self, precision: str, policy: PolicyLike | None, scaler: GradScaler | None
    ) -> None:
        name = type(self).__name__
        if precision not in _DTYPES:
            meant = _ALIASES.get(precision, "bf16-mixed")
            raise ValueError(
                f"{name}({precision!r}): precision must be 'bf16-mixed', '16-mixed' or '32-true'. "
                f"Write {name}({meant!r}, policy=...). Lightning's other modes work without this "
                "plugin."
            )
        self.policy: Policy | None = region_policy(policy, f"plugins=[{name}({precision!r})]")
        if scaler is not None and precision != "16-mixed":
            raise ValueError(
                f"{name}({precision!r}) takes no scaler: loss scaling is for float16. Leave it "
                f"out, or write {name}('16-mixed', scaler=scaler)."
            )
        if scaler is not None:
            check_scaler(scaler, f"{name}('16-mixed')")
        self.precision, self.scaler = precision, scaler
        self.device: str | None = None
        self._autocast: autocast | None = None

    def begin(self, device: str) -> None:
        """Make the region, and the scaler if none was given, once the device is known."""
        if device == self.device:
            return
        self.device, dtype = device, _DTYPES[self.precision]
        if dtype is not None:
            self._autocast = autocast(device, dtype=dtype, policy=self.policy)
        if dtype is torch.float16 and self.scaler is None:
            self.scaler = GradScaler(device)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the region; a context that does nothing for 32-true."""
        region = self._autocast
        if region is None:
            return nullcontext()
        name = type(self).__name__
        line = f"{name}({self.precision!r}, policy=...)"
        refuse_outer_region(region.device, region.fast_dtype, self.policy, name, line)
        return region
