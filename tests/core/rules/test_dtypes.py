"""Format records against numpy's and ml_dtypes' own figures, bit for bit."""

import ml_dtypes
import numpy as np
import pytest

from polymp import dtypes
from polymp.dtypes import FORMATS, Format, widest


def agrees(record: Format) -> bool:
    """True if every figure of the record is what the array library says of the same name."""
    kind = np.dtype(record.name)
    info = ml_dtypes.finfo(kind)

    def same(derived: float, told: object) -> bool:
        return kind.type(derived).tobytes() == kind.type(told).tobytes()

    return (
        record.bits == kind.itemsize * 8 == info.bits
        and record.exponent == info.nexp
        and record.mantissa == info.nmant
        and same(record.max, info.max)
        and same(record.smallest_normal, info.smallest_normal)
        and same(record.smallest_subnormal, info.smallest_subnormal)
        and same(record.eps, info.eps)
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_record_is_what_the_array_library_says(name):
    assert agrees(FORMATS[name])


@pytest.mark.parametrize(
    "wrong",
    [Format("float16", 5, 11), Format("bfloat16", 7, 8), Format("float8_e4m3fn", 4, 3)],
    ids=lambda f: f.name,
)
def test_a_wrong_record_does_not_agree(wrong):
    assert not agrees(wrong)


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_numpy_alone_says_the_same(name):
    info = np.finfo(name)
    record = FORMATS[name]
    assert (record.max, record.eps, record.smallest_subnormal) == (
        float(info.max),
        float(info.eps),
        float(info.smallest_subnormal),
    )


@pytest.mark.parametrize("record", FORMATS.values(), ids=lambda f: f.name)
def test_largest_value_is_followed_by_no_finite_one(record):
    kind = np.dtype(record.name).type
    with np.errstate(over="ignore"):
        beyond = kind(record.max * (1 + record.eps))
    assert np.isfinite(kind(record.max))
    assert not np.isfinite(beyond) or float(beyond) == record.max


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (["float16"], "float16"),
        (["float16", "float16"], "float16"),
        (["bfloat16", "float32"], "float32"),
        (["float16", "bfloat16"], "float32"),
        (["float8_e4m3fn", "float8_e5m2"], "float16"),
        (["float8_e5m2", "bfloat16"], "bfloat16"),
        (["float8_e4m3fn", "bfloat16"], "bfloat16"),
        (["float64", "float16"], "float64"),
    ],
)
def test_widest(names, joined):
    assert widest(names) == widest(reversed(names)) == joined


def test_widest_is_the_join_of_the_order_that_holds_defines():
    for a in FORMATS.values():
        for b in FORMATS.values():
            top = FORMATS[widest([a.name, b.name])]
            assert top.holds(a)
            assert top.holds(b)
            assert not any(
                f.holds(a) and f.holds(b) and f.bits < top.bits for f in FORMATS.values()
            )


def test_unknown_format():
    with pytest.raises(KeyError) as error:
        dtypes.get("float17")
    assert error.value.args[0] == f"no float format 'float17'; known: {', '.join(FORMATS)}"


def test_widest_of_nothing():
    with pytest.raises(ValueError, match=r"^widest\(\) of no formats; give at least one name$"):
        widest([])
