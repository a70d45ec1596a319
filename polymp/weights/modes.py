"""The three ways to keep a weight in 16 bits, as data."""

from typing import NamedTuple

from polymp import dtypes


class Mode(NamedTuple):
    """One way to keep weights low.

    Attributes:
        name: as the user gives it.
        beside: dtype of what stands beside each weight; "" if nothing does.
        exact: True if a float32 weight is kept to the last bit.
        accepted: dtypes that the weights may have.
        note: one line for tables and messages.
    """

    name: str
    beside: str
    exact: bool
    accepted: tuple[str, ...]
    note: str

    def bytes_a_weight(self) -> int:
        """Return the bytes of a weight and of what stands beside it."""
        return 2 + _BYTES[self.beside]


_BYTES = {"": 0, "int16": 2, "float32": 4}
_BF16 = ("bfloat16",)

MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("master", "float32", True, ("bfloat16", "float16"), "a float32 copy of each weight"),
        Mode("split", "int16", True, _BF16, "the other 16 bits of the float32 weight"),
        Mode("stochastic", "", False, _BF16, "nothing; each step rounds up or down at random"),
    )
}


def mode(name: object) -> Mode:
    """Return the mode of a name."""
    found = MODES.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(repr(each) for each in MODES)
        raise ValueError(f"low_weights(): mode {name!r} is not one of {known}.")
    return found


def low_dtype(mode: Mode, dtype: object) -> str:
    """Return the name of the dtype that weights are kept in, if the mode allows it."""
    name = low_name(dtype, "low_weights(): dtype")
    if name not in mode.accepted:
        raise ValueError(
            f"low_weights(): mode {mode.name!r} keeps weights in bfloat16, not in {name}, because "
            f"it works on the upper 16 bits of float32. Write mode='master' to keep {name} weights."
        )
    return name


def low_name(dtype: object, what: str) -> str:
    """Return the name of a low dtype."""
    return dtypes.name(dtype, ("bfloat16", "float16"), what)
