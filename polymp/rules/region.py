"""A region says how ops run between entering and leaving it. Nothing here knows a framework."""

from contextlib import suppress
from dataclasses import dataclass

from polymp import dtypes, fp8
from polymp.errors import PolicyError
from polymp.rules.policy import Policy
from polymp.rules.row import Rule


@dataclass(frozen=True, slots=True)
class Region:
    """The settings of a region: they hold from entering it to leaving it."""

    backend: str  # "torch" or "jax"
    device: str  # the device type whose ops run by it, such as "cpu" or "cuda"
    enabled: bool  # False for a subregion in which ops run in the dtypes of their inputs
    dtype: str  # the low dtype, by full name; an alias or a dtype object becomes that
    cache: bool  # True if the casts of parameters may be kept until the region ends
    # The table that decides; None for the backend's own table of that device.
    policy: Policy | None = None
    scope: str = ""  # path of the module that the region is in, names joined by dots

    def __post_init__(self) -> None:
        # Only a disabled region has another dtype than a float one, by torch's own name.
        with suppress(ValueError):
            object.__setattr__(self, "dtype", dtypes.name(self.dtype))
        if self.enabled and self.policy is not None and self.policy.fp8:
            _check_fp8(self.policy, self.dtype)


def _check_fp8(policy: Policy, dtype: str) -> None:
    """Refuse an enabled region of another dtype than bfloat16 with products in 8 bits."""
    in_8_bits = any(row.rule is Rule.FP8 and row.dtype in ("", dtype) for row in policy.rows)
    if in_8_bits and dtype != fp8.REGION_DTYPE:
        raise PolicyError(
            f"autocast(): policy {policy.name!r} runs products in 8 bits, which needs a region of "
            f"dtype bfloat16, not {dtype}: {fp8.NOT_FLOAT16}. Write bfloat16, or a policy "
            "without rule fp8."
        )
