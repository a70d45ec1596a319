"""The text that an optimizer of `low_weights` shows of itself."""

from collections.abc import Mapping


def summary(mode: str, dtype: str, kept: Mapping[str, str], low: int | None = None) -> str:
    """Return which parameters are not stored low, and why, as text."""
    count = "" if low is None else f"{low} in "
    lines = [f"low weights: {count}{dtype}, mode {mode!r}"]
    if kept:
        lines += ["not stored low:", *(f"    {name}: {why}" for name, why in kept.items())]
    return "\n".join(lines)
