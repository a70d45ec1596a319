"""The dtype that is advised, and times that are predicted, from figures that are made up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import pytest

from polymp.speed import product_times
from polymp.speed.advice import (
    BFLOAT16,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    HELD,
    Product,
    Timed,
    advise,
    ratio,
)
from polymp.speed.product_times import Run, figures, ordered, timed
from polymp.speed.time_model import Model, distance

LAW = {FLOAT32: (2e-6, 1e-11), BFLOAT16: (5e-6, 2e-12), FLOAT16: (5e-6, 3e-11)}


def linear(m: int, k: int, n: int, times: int = 1) -> Product:
    sizes = m * k + k * n + m * n
    return Product("matmul", 1, m, k, n, 2 * m * k * n, sizes, n * k, n * k, times=times)


def took(product: Product, low: dict[str, float], off: float = 1.01, **spread: Any) -> Timed:
    """A product that takes 1 ms in float32, and so much in the others."""
    ratios = {FLOAT32: 1.0, **low}
    ends = {way: (r / off, r * off) for way, r in ratios.items()} | spread
    return Timed(product, {way: r * 1e-3 for way, r in ratios.items()}, ends)


ONE = linear(64, 64, 64)


@pytest.mark.parametrize(
    ("low", "use", "why"),
    [
        ({BFLOAT16: 0.3, FLOAT16: 0.3}, BFLOAT16, "needs no GradScaler"),
        (
            {BFLOAT16: 0.3, FLOAT16: 0.25},
            BFLOAT16,
            "bfloat16 takes 0.30 of float32's time (float16 0.25) and needs no G",
        ),
        ({BFLOAT16: 0.3, FLOAT16: 0.23}, FLOAT16, "needs a GradScaler"),
        ({BFLOAT16: 1.2, FLOAT16: 0.5}, FLOAT16, "needs a GradScaler"),
        (
            {BFLOAT16: 1.2, FLOAT16: 1.1},
            FLOAT32,
            "bfloat16 takes 1.20 of float32's time, float16 1.10: no gain.",
        ),
        ({BFLOAT16: 0.97, FLOAT16: 1.1}, FLOAT32, "no gain beyond noise."),
        ({BFLOAT16: 0.94, FLOAT16: 1.1}, BFLOAT16, "bfloat16 takes 0.94"),
        ({FLOAT16: 0.5}, FLOAT16, "float16 takes 0.50 of float32's time and needs a GradScaler"),
        ({BFLOAT16: 2.0}, FLOAT32, "bfloat16 takes 2.00 of float32's time: no gain."),
    ],
)
def test_the_dtype_to_use(low: dict[str, float], use: str, why: str) -> None:
    found = advise([took(ONE, low)])
    assert found.use == use
    assert why in found.why


def test_a_ratio_that_may_be_above_one_is_not_advised() -> None:
    assert advise([took(ONE, {BFLOAT16: 0.6}, off=1.5)]).use == BFLOAT16
    assert advise([took(ONE, {BFLOAT16: 0.6}, off=2.0)]).use == FLOAT32


def test_products_count_by_their_time_and_their_runs() -> None:
    fast, slow = took(ONE, {BFLOAT16: 0.2}), took(linear(1, 64, 64, times=5), {BFLOAT16: 1.5})
    assert advise([fast]).use == BFLOAT16
    found = advise([fast, slow])
    assert found.use == FLOAT32
    assert ratio([fast, slow], BFLOAT16).ratio == pytest.approx((0.2 + 5 * 1.5) / 6)
    once = slow._replace(product=slow.product._replace(times=1))
    assert advise([fast, once]).use == BFLOAT16, "a wrong count changes the advice"


def test_what_else_is_said() -> None:
    held = {BFLOAT16: 3.0, FLOAT16: 4.0, BFLOAT16 + HELD: 0.8}
    found = advise([took(ONE, held)])
    assert found.use == FLOAT32
    assert found.more == (
        "With weights that are cast once, by freeze or in torch hold_casts, bfloat16 takes 0.80.",
        "To save memory: bfloat16 halves the activations that products keep, for 3.00 of the time.",
    )
    (said,) = advise([took(ONE, {BFLOAT16: 0.5, FLOAT8: 0.4})]).more
    assert said.startswith("float8_e4m3fn takes 0.40, with given scales")
    assert advise([took(ONE, {BFLOAT16: 0.5, BFLOAT16 + HELD: 0.49})]).more == ()


def test_a_product_that_cannot_run_in_a_way_counts_as_without() -> None:
    rows = [
        took(ONE, {BFLOAT16: 0.5, BFLOAT16 + HELD: 0.1, FLOAT8: 0.2}),
        took(ONE, {BFLOAT16: 0.7}),
    ]
    assert ratio(rows, BFLOAT16 + HELD).ratio == pytest.approx(0.4)
    assert ratio(rows, FLOAT8).ratio == pytest.approx(0.45)


# Predictions


def law(product: Product) -> dict[str, float]:
    """Times that follow a law: overhead and a rate."""
    return {way: a + b * product.flops for way, (a, b) in LAW.items()}


SIZES = ((1, 512, 512), (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512))


def test_times_that_follow_the_law_are_predicted() -> None:
    model = Model({linear(*size): law(linear(*size)) for size in SIZES})
    for size in ((384, 384, 384), (512, 512, 1024), (128, 256, 512)):
        found, right = model.seconds(linear(*size)), law(linear(*size))
        assert found[FLOAT32] == pytest.approx(right[FLOAT32], rel=0.05)
        told, true = found[BFLOAT16] / found[FLOAT32], right[BFLOAT16] / right[FLOAT32]
        assert told == pytest.approx(true, rel=0.5)


def test_a_planted_figure_changes_what_is_predicted_near_it_and_the_advice() -> None:
    samples = {linear(*size): law(linear(*size)) for size in SIZES}
    product, near = linear(512, 512, 640), linear(512, 512, 512)
    before = Model(samples).seconds(product)
    assert before[BFLOAT16] < 0.4 * before[FLOAT32]
    samples[near] = samples[near] | {BFLOAT16: samples[near][BFLOAT16] * 20}
    after = Model(samples).seconds(product)
    assert after[FLOAT32] == pytest.approx(before[FLOAT32])
    assert after[BFLOAT16] > after[FLOAT32]

    def use(seconds: dict[str, float]) -> str:
        ratios = {way: (took / seconds[FLOAT32],) * 2 for way, took in seconds.items()}
        return advise([Timed(product, seconds, ratios, False)]).use

    assert (use(before), use(after)) == (BFLOAT16, FLOAT32)


def test_one_sample_is_enough_for_a_prediction() -> None:
    found = Model({ONE: law(ONE)}).seconds(linear(1024, 1024, 1024))
    assert all(math.isfinite(took) and took > 0 for took in found.values())
    assert found[BFLOAT16] / found[FLOAT32] == pytest.approx(law(ONE)[BFLOAT16] / law(ONE)[FLOAT32])


def test_distance() -> None:
    assert distance(ONE, ONE) == 0
    assert distance(ONE, linear(64, 64, 128)) == pytest.approx(1, abs=0.2)
    assert distance(ONE, ONE._replace(casts=0)) > 1
    assert distance(ONE, ONE._replace(op="conv")) > distance(ONE, linear(4096, 64, 64))


# Measuring, on a bench whose clock is made up


class Made:
    """A bench whose products take what a law says, and that moves a clock on by it."""

    def __init__(
        self,
        of: Callable[[Product], dict[str, float]] = law,
        ways: tuple[str, ...] = (FLOAT32, BFLOAT16, FLOAT16),
    ) -> None:
        self.of, self.ways, self.least = of, ways, 0.01
        self.clock = 0.0
        self.ran: list[tuple[Product, str]] = []

    def linear(self, m: int, k: int, n: int) -> Product:
        return linear(m, k, n)

    def able(self, product: Product, way: str) -> bool:
        return True

    def made(self, product: Product, way: str) -> Run:
        def run(times: int) -> float:
            self.ran.append((product, way))
            self.clock += times * self.of(product)[way]
            return times * self.of(product)[way]

        return run

    def now(self) -> float:
        return self.clock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was changed."""


def run(bench: Made, *sizes: tuple[int, int, int], budget: float = 1.0) -> Any:
    return timed([linear(*size) for size in sizes], bench, budget, bench.now)


def test_all_are_measured_where_there_is_time() -> None:
    bench = Made()
    rows, left = run(bench, *SIZES, budget=4.5)
    assert left == {}
    assert all(row.measured for row in rows)
    assert [row.product for row in rows] == [linear(*size) for size in SIZES]
    for row in rows:
        assert row.seconds == pytest.approx(law(row.product))
    assert bench.clock < 4.5


@pytest.mark.parametrize("budget", [0.05, 0.2, 3.0])
def test_the_budget_is_kept_and_the_rest_predicted(budget: float) -> None:
    bench = Made()
    sizes = tuple((2**a, 2**b, 2**c) for a in (0, 4, 8) for b in (6, 10) for c in (6, 10))
    rows, _ = run(bench, *sizes, budget=budget)
    assert len(rows) == len(sizes)
    assert any(row.measured for row in rows)
    assert any(not row.measured for row in rows) == (budget < 3)
    assert bench.clock < budget + 0.1
    for row in rows:
        low, high = row.spread[BFLOAT16]
        assert (low < row.seconds[BFLOAT16] / row.seconds[FLOAT32] < high) or row.measured


def test_a_product_too_large_is_measured_smaller_and_scaled() -> None:
    bench = Made()
    (row,), _ = run(bench, (16384, 16384, 16384))
    assert not row.measured
    assert row.seconds[FLOAT32] == pytest.approx(law(row.product)[FLOAT32], rel=0.1)
    assert max(p.values for p, _ in bench.ran) <= product_times.LARGEST
    assert bench.clock < 2


def test_a_product_that_only_seemed_too_large_is_measured_after_all() -> None:
    def small_ones_are_slow(product: Product) -> dict[str, float]:
        slow = 100.0 if product.m == 1 else 1.0
        return {way: slow * took for way, took in law(product).items()}

    bench = Made(small_ones_are_slow)
    rows, _ = run(bench, (1, 1024, 4096), (512, 512, 2048), budget=4.0)
    assert all(row.measured for row in rows)
    assert bench.ran[0][0] == linear(1, 1024, 4096)
    assert bench.clock < 4


def test_a_way_far_slower_than_float32_is_run_once() -> None:
    def slow(product: Product) -> dict[str, float]:
        return law(product) | {FLOAT16: 10000 * law(product)[FLOAT32]}

    bench = Made(slow)
    found = figures(ONE, bench, bench.ways, end=10.0, now=bench.now)
    assert len(found[FLOAT16]) == 1
    assert len(found[FLOAT32]) == len(found[BFLOAT16]) == product_times.ROUNDS[1]
    (row,), _ = run(Made(slow), (64, 64, 64))
    assert row.seconds[FLOAT16] == pytest.approx(slow(ONE)[FLOAT16])
    assert advise([row]).use != FLOAT16


def test_emulated_float8_is_left_with_a_reason() -> None:
    def with_float8(times: float) -> Callable[[Product], dict[str, float]]:
        return lambda product: law(product) | {FLOAT8: times * law(product)[FLOAT32]}

    ways = FLOAT32, BFLOAT16, FLOAT8
    rows, left = run(Made(with_float8(100.0), ways), *SIZES)
    assert left == {FLOAT8: "it is emulated: 64x64x64 takes 100 times as long as in float32"}
    assert all(FLOAT8 not in row.seconds for row in rows)
    rows, left = run(Made(with_float8(0.5), ways), *SIZES)
    assert left == {}
    assert ratio(rows, FLOAT8).ratio == pytest.approx(0.5)


@pytest.mark.parametrize(("least", "held"), [(0.1, True), (0.2, False)])
def test_held_weights_are_left_out_where_time_is_short(least: float, held: bool) -> None:
    def of(product: Product) -> dict[str, float]:
        return law(product) | {BFLOAT16 + HELD: law(product)[BFLOAT16] / 2}

    bench = Made(of, (FLOAT32, BFLOAT16, BFLOAT16 + HELD))
    bench.least = least
    rows, left = run(bench, *SIZES)  # five in a second
    assert any(BFLOAT16 + HELD in row.seconds for row in rows) is held
    assert left == ({} if held else {BFLOAT16 + HELD: "there are too many products for the time"})


def test_the_order_starts_near_the_probe_and_goes_to_what_is_unlike() -> None:
    products = [linear(*size) for size in (*SIZES, (1, 4096, 4096), (2048, 2048, 2048))]
    order = ordered(products, linear(*product_times.PROBE))
    assert order[0] == linear(256, 256, 256)
    assert set(order) == set(products)
    assert len(order) == len(products)
    assert order[2] == linear(2048, 2048, 2048), "the most work"
    assert order[1] == max(products, key=lambda p: distance(p, order[0]))
    large = [linear(2048, 2048, 2048)]
    assert ordered(large, ONE) == [ONE, *large]
