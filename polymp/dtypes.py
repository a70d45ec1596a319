"""Float formats as records.

A format is known by its full name ("bfloat16"). A record holds the three widths and the one flag
that a standard gives; every other number is derived from them. `widest` joins formats. Nothing
here knows a framework's dtype objects.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """A binary float format.

        bits      = 1 + exponent + mantissa
        value     = (-1)**sign * 2**(e - bias) * (1 + m / 2**mantissa)     e > 0
        subnormal = (-1)**sign * 2**(1 - bias) * (m / 2**mantissa)         e = 0

    Attributes:
        name: the full name, as numpy, ml_dtypes, torch and jax spell it.
        exponent: width of the exponent field, in bits.
        mantissa: width of the stored fraction, in bits.
        infinite: True if the all-ones exponent is kept for infinities and NaNs, as IEEE 754 has it;
            False if it holds numbers too, and only the all-ones fraction in it is NaN.

    Source:
        IEEE 754-2019, section 3.4; Micikevicius et al., "FP8 formats for deep learning",
        arXiv:2209.05433, table 1.
    """

    name: str
    exponent: int
    mantissa: int
    infinite: bool = True

    @property
    def bits(self) -> int:
        """Storage width, sign included."""
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        """What is subtracted from the stored exponent."""
        return int(2 ** (self.exponent - 1)) - 1

    @property
    def max(self) -> float:
        """The largest finite value."""
        top = int(2**self.exponent) - 1 - self.infinite
        fraction = 2 - 2.0**-self.mantissa * (1 if self.infinite else 2)
        return math.ldexp(fraction, top - self.bias)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with a full fraction."""
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value."""
        return math.ldexp(1.0, 1 - self.bias - self.mantissa)

    @property
    def eps(self) -> float:
        """The distance from 1 to the next larger value."""
        return math.ldexp(1.0, -self.mantissa)

    def holds(self, other: "Format") -> bool:
        """True if every exponent and every digit of `other` fits."""
        return self.exponent >= other.exponent and self.mantissa >= other.mantissa


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("float8_e4m3fn", 4, 3, infinite=False),
        Format("float8_e5m2", 5, 2),
        Format("float16", 5, 10),
        Format("bfloat16", 8, 7),
        Format("float32", 8, 23),
        Format("float64", 11, 52),
    )
}


def get(name: str) -> Format:
    """The format of that name.

    Raises:
        KeyError: no format has the name; the message lists those that exist.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise KeyError(f"no float format {name!r}; known: {', '.join(FORMATS)}") from None


def widest(names: Iterable[str]) -> str:
    """The narrowest format that holds all of `names`.

    float16 with bfloat16 gives float32: neither holds the other.

    Args:
        names: format names, at least one.

    Raises:
        ValueError: `names` is empty.
    """
    members = {get(name) for name in names}
    if not members:
        raise ValueError("widest() of no formats; give at least one name")
    candidates = [f for f in FORMATS.values() if all(f.holds(m) for m in members)]
    return min(candidates, key=lambda f: f.bits).name
