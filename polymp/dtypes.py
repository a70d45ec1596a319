"""Float dtypes by name, and the format of each as a record.

    name(value)    the full name of a dtype that a user wrote: "fp16", torch.float16, np.float16
    FORMATS[name]  its format: the three widths and the one flag that a standard gives
    widest(names)  the narrowest dtype that holds all of them

Every other number of a format is derived from the record. No framework is imported: a dtype object
is known by the name that it gives itself.
"""

import math
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """A binary float format.

        bits      = 1 + exponent + mantissa
        value     = (-1)**sign * 2**(e - bias) * (1 + m / 2**mantissa)     e > 0
        subnormal = (-1)**sign * 2**(1 - bias) * (m / 2**mantissa)         e = 0

    Source:
        IEEE 754-2019, section 3.4; Micikevicius et al., "FP8 formats for deep learning",
        arXiv:2209.05433, table 1.
    """

    name: str  # the full name, as numpy, ml_dtypes, torch and jax spell it
    exponent: int  # width of the exponent field, in bits
    mantissa: int  # width of the stored fraction, in bits
    # True if the all-ones exponent is kept for infinities and NaNs, as IEEE 754 has it; False if it
    # holds numbers too, and only the all-ones fraction in it is NaN.
    infinite: bool = True

    @property
    def bits(self) -> int:
        """Storage width, sign included."""
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        """The number that is subtracted from the stored exponent."""
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


# Other names of the dtypes. "float8_e4m3" is none: in jax it is a format of its own.
ALIASES: dict[str, tuple[str, ...]] = {
    "float8_e4m3fn": ("fp8_e4m3", "fp8_e4m3fn", "e4m3", "e4m3fn"),
    "float8_e5m2": ("fp8_e5m2", "e5m2"),
    "float16": ("fp16", "half", "f16"),
    "bfloat16": ("bf16",),
    "float32": ("fp32", "f32", "float", "single"),
    "float64": ("fp64", "f64", "double"),
}
FULL: dict[str, str] = {alias: full for full, names in ALIASES.items() for alias in (full, *names)}


def name(value: object, accepted: Iterable[str] = FORMATS, what: str = "dtype") -> str:
    """Return the full name of a dtype.

        name("fp16") == name(torch.half) == name(jnp.float16) == name("float16") == "float16"

    Args:
        value: a name or alias, "torch." in front or not, or a dtype or scalar type of torch, jax,
            ml_dtypes or numpy.
        accepted: full names of the dtypes that are accepted.
        what: the value is, for messages, such as "explain(): dtype".

    Returns:
        The name as numpy, ml_dtypes, torch and jax spell it, such as "bfloat16".

    Raises:
        TypeError: `value` is neither a string nor a dtype.
        ValueError: it is another dtype than the accepted ones, or none.
    """
    accepted = tuple(accepted)
    given = _spelled(value)
    found = FULL.get(given, "")
    if found in accepted:
        return found
    said = reprlib.repr(value) if isinstance(value, str) or not given else given
    names = [f"{full} ({ALIASES[full][0]})" for full in accepted]
    instead = f"Write {', '.join(names)}, or such a dtype of torch, jax or numpy."
    if not given and not isinstance(value, str):
        raise TypeError(f"{what} {said} is not a dtype. {instead}")
    fault = "is not accepted here" if found else "is not a float dtype that polymp knows"
    raise ValueError(f"{what} {said} {fault}. {instead}")


def _spelled(value: object) -> str:
    """The name of a dtype as it was given or as it gives itself, "" for what is no dtype."""
    if isinstance(value, str):
        return value.removeprefix("torch.")
    if isinstance(value, type):  # numpy.float16, jax.numpy.bfloat16; Python's float is float64
        return value.__name__ if value.__module__ != "builtins" else ""
    if type(value).__name__ == "dtype":  # torch's
        return str(value).removeprefix("torch.")
    own = getattr(value, "name", "")  # numpy's
    return own if isinstance(own, str) and hasattr(value, "itemsize") else ""


def widest(names: Iterable[str]) -> str:
    """Return the narrowest dtype whose format holds all of `names`.

    float16 with bfloat16 gives float32: neither holds the other.

    Args:
        names: names of dtypes, at least one.

    Returns:
        Its full name.

    Raises:
        ValueError: `names` is empty, or one is no name of a float dtype.
    """
    members = {FORMATS.get(each) or FORMATS[name(each)] for each in names}
    if not members:
        raise ValueError("widest() of no formats; give at least one name")
    candidates = [f for f in FORMATS.values() if all(f.holds(m) for m in members)]
    return min(candidates, key=lambda f: f.bits).name
