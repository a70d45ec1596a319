"""Format records against numpy's and ml_dtypes' own figures, bit for bit; the names of dtypes."""

import ml_dtypes
import numpy as np
import pytest

from polymp import dtypes, text_table
from polymp.dtypes import FORMATS, Format, widest
from polymp.errors import PolicyError
from polymp.rules.policy import Policy, Region
from polymp.rules.policy_files import load
from polymp.rules.row import LOW, Row
from tests.support.dtype_spellings import spellings


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


def test_widest_is_the_join_of_the_order_that_holds_defines():
    for a in FORMATS.values():
        for b in FORMATS.values():
            top = FORMATS[widest([a.name, b.name])]
            assert top.holds(a)
            assert top.holds(b)
            assert not any(
                f.holds(a) and f.holds(b) and f.bits < top.bits for f in FORMATS.values()
            )


def test_widest_of_nothing():
    with pytest.raises(ValueError, match=r"^widest\(\) of no formats; give at least one name$"):
        widest([])


WRITE = (
    "Write float8_e4m3fn (fp8_e4m3), float8_e5m2 (fp8_e5m2), float16 (fp16), bfloat16 (bf16), "
    "float32 (fp32), float64 (fp64), or such a dtype of torch, jax or numpy."
)


@pytest.mark.parametrize("full", FORMATS)
def test_every_spelling_has_its_full_name(full):
    for spelling in spellings(full):
        assert dtypes.name(spelling) == full


def test_an_alias_is_of_one_dtype_and_no_full_name():
    aliases = [alias for names in dtypes.ALIASES.values() for alias in names]
    assert len({*aliases, *FORMATS}) == len(aliases) + len(FORMATS)
    assert dtypes.ALIASES.keys() == FORMATS.keys()


def test_what_tables_print_is_a_name():
    for full in FORMATS:
        assert dtypes.name(text_table.short(full)) == full


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        ("float17", ValueError, "dtype 'float17' is not a float dtype that polymp knows. "),
        ("", ValueError, "dtype '' is not a float dtype that polymp knows. "),
        ("float8_e4m3", ValueError, "dtype 'float8_e4m3' is not a float dtype that polymp knows. "),
        (np.int32, ValueError, "dtype int32 is not a float dtype that polymp knows. "),
        (np.dtype("bool"), ValueError, "dtype bool is not a float dtype that polymp knows. "),
        (None, TypeError, "dtype None is not a dtype. "),
        (float, TypeError, "dtype <class 'float'> is not a dtype. "),  # torch's 64 bits, jax's 32
        (16, TypeError, "dtype 16 is not a dtype. "),
        (np.zeros(2), TypeError, "dtype array([0., 0.]) is not a dtype. "),
    ],
)
def test_what_is_no_dtype_is_refused(value, error, said):
    with pytest.raises(error) as raised:
        dtypes.name(value)
    assert str(raised.value) == said + WRITE


def test_a_dtype_that_a_place_does_not_accept():
    with pytest.raises(ValueError, match="dtype") as raised:
        dtypes.name("fp32", LOW, "freeze(): dtype")
    assert str(raised.value) == (
        "freeze(): dtype 'fp32' is not accepted here. "
        "Write float16 (fp16), bfloat16 (bf16), or such a dtype of torch, jax or numpy."
    )


WIDEST = Policy("p", (Row("add", "widest"),))


@pytest.mark.parametrize("low", LOW)
def test_policies_rows_and_regions_take_every_spelling(low):
    own = {"softmax": {low: "lower"}}
    policy = load("amp").override(rules=own)
    for spelling in spellings(low):
        assert load({"rules": {"softmax": {spelling: "lower"}}}) == load({"rules": own})
        assert load("amp").override(rules={"softmax": {spelling: "lower"}}) == policy
        assert Row("softmax", "lower", spelling) == Row("softmax", "lower", low)
        why = policy.why("softmax", spelling)
        assert (why.rule, why.dtype) == ("lower", low)
        region = Region("torch", "cpu", True, spelling, True)
        assert region == Region("torch", "cpu", True, low, True)
        if spelling in dtypes.FULL:
            assert policy.winner("softmax", spelling) == policy.winner("softmax", low)
            assert WIDEST.decide("add", (spelling, "fp32"), region).run == "float32"
            assert WIDEST.decide("add", (spelling,), region).run == low


def test_two_spellings_of_one_dtype_in_a_row():
    said = r"^policy 'unnamed' gives 'softmax' \(float16\) two rules: fp32 and lower\. Keep one\."
    with pytest.raises(PolicyError, match=said):
        load({"rules": {"softmax": {"fp16": "fp32", "float16": "lower"}}})


def test_a_region_keeps_a_dtype_that_is_no_float():
    assert Region("torch", "cpu", False, "int8", True).dtype == "int8"
    with pytest.raises(TypeError, match=r"^dtype None is not a dtype\."):
        Region("torch", "cpu", True, None, True)
