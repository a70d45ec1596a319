"""The dtype to use for matrix products, judged from times that were measured.

    timed products -> advise -> the dtype, and why

Nothing here measures, or knows a framework. `time_model` predicts times that were not measured.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from polymp.diagnostics.call_record import FORWARD

FLOAT32, BFLOAT16, FLOAT16, FLOAT8 = "float32", "bfloat16", "float16", "float8_e4m3fn"
# Added to a way: the weights were cast before, as by `hold_casts` or `freeze`.
HELD = ", weights cast before"
# Less than this much of a difference is noise.
NOISE = 0.05
# float16 needs a loss scaler, so it has to be this much faster than bfloat16 to be worth it.
WORTH_A_SCALER = 0.8


class Product(NamedTuple):
    """`batch` products of [m, k] by [k, n], or a convolution, by the product that it amounts to.

    Attributes:
        op: "matmul" or "conv".
        batch: how many products; of a convolution, its groups.
        m: rows of the left operand.
        k: columns of the left operand.
        n: columns of the right operand.
        flops: a multiply-add is two.
        values: how many numbers it reads and writes.
        casts: how many numbers a region casts for it at each call.
        weights: how many of these are of weights.
        direction: "forward", "backward" or "recompute".
        times: how often it runs.
        call: for the backend that runs it; no other reads it.
    """

    op: str
    batch: int
    m: int
    k: int
    n: int
    flops: int
    values: int
    casts: int = 0
    weights: int = 0
    direction: str = FORWARD
    times: int = 1
    call: Any = None

    @property
    def shape(self) -> str:
        """The sizes as text: "512x512x2048", with "8 of " in front of a batch."""
        sizes = f"{self.m}x{self.k}x{self.n}"
        return sizes if self.batch == 1 else f"{self.batch} of {sizes}"


class Found(NamedTuple):
    """The products of a program.

    Attributes:
        products: different ones, each with how often it runs.
        left_out: by name, FLOPs of ops that are made of products, which are not among them.
    """

    products: list[Product]
    left_out: Mapping[str, int]


class Timed(NamedTuple):
    """A product with its time in each way.

    Attributes:
        product: the product.
        seconds: by way, a dtype or a dtype with `HELD`; casts are included.
        spread: by way, the lower and upper quartile of its ratios to float32; of a prediction, how
            far it may be off.
        measured: False if the times were predicted.
    """

    product: Product
    seconds: Mapping[str, float]
    spread: Mapping[str, tuple[float, float]]
    measured: bool = True


class Ratio(NamedTuple):
    """A time as a multiple of float32's, and the range that it is in."""

    ratio: float
    low: float
    high: float


class Advice(NamedTuple):
    """The dtype to use.

    Attributes:
        use: "float32", "bfloat16" or "float16".
        why: in a sentence.
        more: further sentences, on memory, on weights that are cast before, and on float8.
    """

    use: str
    why: str
    more: tuple[str, ...] = ()


def ways(rows: Sequence[Timed]) -> list[str]:
    """The ways that at least one product has a time in, float32 first."""
    return list(dict.fromkeys(way for row in rows for way in row.seconds))


def seconds(row: Timed, way: str) -> float:
    """The time of a product in a way, all its runs together.

    A product that cannot run in the way runs as it would without: with weights that are cast at
    each call, in bfloat16 instead of float8.
    """
    return row.seconds[_own(row, way)] * row.product.times


def _own(row: Timed, way: str) -> str:
    if way in row.seconds:
        return way
    way = way.removesuffix(HELD)
    return way if way in row.seconds else BFLOAT16


def ratio(rows: Sequence[Timed], way: str) -> Ratio:
    """The time of all products in a way, as a multiple of float32's."""
    base = sum(seconds(row, FLOAT32) for row in rows)
    ends = [row.spread[_own(row, way)] for row in rows]
    low, high = (
        sum(end[i] * seconds(row, FLOAT32) for row, end in zip(rows, ends, strict=True)) / base
        for i in range(2)
    )
    return Ratio(sum(seconds(row, way) for row in rows) / base, low, high)


def advise(rows: Sequence[Timed]) -> Advice:
    """Return the dtype to use for products that run one after the other.

    A low dtype has to take less of float32's time than noise explains: at most 0.95, and less than
    1 at the upper end of its spread. bfloat16 comes before float16, which needs a loss scaler,
    unless float16 takes less than 0.8 of bfloat16's time.
    """
    found = {way: ratio(rows, way) for way in ways(rows)}
    low = [way for way in (BFLOAT16, FLOAT16) if way in found]
    fast = [way for way in low if _gains(found[way])]
    if not fast:
        use = FLOAT32
    elif fast == [FLOAT16] or (
        FLOAT16 in fast and found[FLOAT16].ratio < WORTH_A_SCALER * found[BFLOAT16].ratio
    ):
        use = FLOAT16
    else:
        use = BFLOAT16
    first, *others = [use, *(way for way in low if way != use)] if fast else low
    why = f"{first} takes {found[first].ratio:.2f} of float32's time"
    if fast:
        why += "".join(f" ({way} {found[way].ratio:.2f})" for way in others)
        scaler = {BFLOAT16: "needs no GradScaler", FLOAT16: "needs a GradScaler in training"}[use]
        why += f" and {scaler}."
    else:
        why += "".join(f", {way} {found[way].ratio:.2f}" for way in others)
        close = min(found[way].ratio for way in low) <= 1 + NOISE
        why += f": no gain{' beyond noise' if close else ''}."
    return Advice(use, why, tuple(_more(found, use)))


def _gains(found: Ratio) -> bool:
    return found.ratio <= 1 - NOISE and found.high < 1


def _more(found: Mapping[str, Ratio], use: str) -> Iterable[str]:
    for way, r in found.items():
        plain = way.removesuffix(HELD)
        if way != plain and _gains(r) and r.ratio < found[plain].ratio * (1 - NOISE):
            yield (
                f"With weights that are cast once, by freeze or in torch hold_casts, {plain} takes "
                f"{r.ratio:.2f}."
            )
    if use == FLOAT32 and BFLOAT16 in found:
        yield (
            "To save memory: bfloat16 halves the activations that products keep, for "
            f"{found[BFLOAT16].ratio:.2f} of the time."
        )
    if FLOAT8 in found:
        yield (
            f"{FLOAT8} takes {found[FLOAT8].ratio:.2f}, with given scales and casts of both "
            "operands; policy fp8 runs products in it."
        )
