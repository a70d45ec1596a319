"""Times of matrix products in float32 and in the low dtypes, within a time budget.

    products -> in order, measured until the time is up -> the others predicted -> Timed

Each backend has a `Bench`, which runs products. The clock is an argument.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from polymp import progress
from polymp.speed.advice import FLOAT8, FLOAT32, HELD, Product, Timed
from polymp.speed.time_model import Model, distance

BUDGET = 4.5  # seconds, for everything that is run
FIGURE = 12e-3  # seconds that a figure takes at least: the clock is fine enough, the caches warm
ROUNDS = 3, 11  # of paired figures, at least and at most
LARGEST = 2**25  # values that a product may read and write; a larger one is predicted
HURRY = 0.75  # share of the budget that all products at least take, to leave out held weights
HOPELESS = 8.0, 20e-3  # a way that takes so many times float32's time, and seconds, is run once
EMULATED = 20.0  # float8 that takes so many times float32's time is emulated, and is left out
SMALL = 64, 64, 64  # the product that shows it
PROBE = 256, 256, 256  # about the size of the product that is measured first
# How far off a ratio may be that is not measured, as a factor: where a smaller product of the same
# form was measured, and for each unit of distance from the nearest product that was.
# benchmarks/advice.py checks ratios against it.
SCALED, FITTED = 1.5, 1.8

Run = Callable[[int], float]  # runs a program n times; returns the seconds that it took


class Bench(Protocol):
    """A device of a framework, ready to run products.

    Attributes:
        ways: float32 first; dtypes, and dtypes with `advice.HELD`.
        least: seconds that a product takes at least in all ways together, with compiling it.
    """

    ways: Sequence[str]
    least: float

    def linear(self, m: int, k: int, n: int) -> Product:
        """The product of an activation [m, k] and a weight that is cast at each call."""
        ...

    def able(self, product: Product, way: str) -> bool:
        """True if a product can run in a way."""
        ...

    def made(self, product: Product, way: str) -> Run:
        """A product, compiled, in a way that it can run in."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


Figures = Mapping[str, Sequence[float]]  # by way, seconds of one run; those of a round together


def timed(
    products: Sequence[Product],
    bench: Bench,
    budget: float = BUDGET,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[list[Timed], dict[str, str]]:
    """Measure the times of products as far as the budget reaches, and predict the others."""
    end = now() + budget
    with bench, progress.line("measuring", len(products), "product") as line:
        ways, left = _without_emulated(bench)
        if len(products) * bench.least > HURRY * budget:
            left |= {way: "there are too many products for the time" for way in ways if HELD in way}
            ways = [way for way in ways if way not in left]
        found: dict[Product, Figures] = {}
        smaller: dict[Product, Product] = {}  # measured in place of products that are too large
        queue = ordered(products, bench.linear(*PROBE))
        for _ in range(2):  # a product that seemed too large may fit in the time that is left
            queue = [product for product in queue if product not in found]
            for at, product in enumerate(queue):
                left_over = end - now()
                if found and left_over < bench.least:
                    break
                share = left_over / min(len(queue) - at, max(left_over / bench.least, 1))
                measured = _within(product, bench, found, share)
                if measured is None:
                    continue
                if measured not in found:
                    found[measured] = figures(measured, bench, ways, now() + share, now)
                    line.step()
                smaller[product] = measured
    model = Model({product: _medians(of) for product, of in found.items()})
    rows = []
    for product in products:
        if product in found:
            rows.append(_measured(product, found[product]))
            continue
        known = smaller.get(product)
        seconds = _scaled(product, known, found[known]) if known else model.seconds(product)
        able = {way: took for way, took in seconds.items() if bench.able(product, way)}
        near = min(distance(product, other) for other in found)
        rows.append(_told(product, able, SCALED if known else max(SCALED, FITTED**near**0.5)))
    return rows, left


def _without_emulated(bench: Bench) -> tuple[list[str], dict[str, str]]:
    """The ways of a bench; float8 not, if it is emulated, which takes long; and the reason."""
    if FLOAT8 not in bench.ways:
        return list(bench.ways), {}
    small, taken = bench.linear(*SMALL), {}
    for way in (FLOAT32, FLOAT8):
        run = bench.made(small, way)
        run(1)
        taken[way] = run(1)
    times = taken[FLOAT8] / taken[FLOAT32]
    if times <= EMULATED:
        return list(bench.ways), {}
    why = f"it is emulated: {small.shape} takes {times:.0f} times as long as in float32"
    return [way for way in bench.ways if way != FLOAT8], {FLOAT8: why}


def ordered(products: Sequence[Product], probe: Product) -> list[Product]:
    """The products in the order in which they are measured, until there is no time left.

    The first is about as large as the probe, or the probe itself. Then, in turn, the one that is
    most unlike those before it, which improves predictions, and the one with the most work.
    """
    small = (p for p in products if p.op == probe.op and p.values <= LARGEST)
    near = [p for p in small if p.flops <= 4 * probe.flops]
    order = [
        min(near, key=lambda p: max(p.flops / probe.flops, probe.flops / p.flops), default=probe)
    ]
    rest = [p for p in products if p not in order]
    far = {p: distance(p, order[0]) for p in rest}
    while rest:
        if len(order) % 2:
            product = max(rest, key=lambda p: far[p])
        else:
            product = max(rest, key=lambda p: p.times * _work(p))
        rest.remove(product)
        order.append(product)
        far = {p: min(far[p], distance(p, product)) for p in rest}
    return order


def _work(product: Product) -> float:
    """FLOPs, plus the moving of numbers counted as FLOPs."""
    return product.flops + 20.0 * (product.values + product.casts)


def figures(
    product: Product,
    bench: Bench,
    ways: Sequence[str],
    end: float,
    now: Callable[[], float] = time.perf_counter,
) -> Figures:
    """Measure a product in several ways, in turn; each round starts with another way.

    A way that comes after another finds the caches full of the other's numbers. So it runs once
    before it is timed: otherwise its time would depend on the number of runs in a figure.
    """
    made = {way: bench.made(product, way) for way in ways if bench.able(product, way)}
    found: dict[str, list[float]] = {}
    inner = {}
    for way, run in made.items():
        run(1)  # warm
        once = run(1)
        inner[way] = max(1, round(FIGURE / 3 / max(once, 1e-6)))
        found[way] = [run(inner[way]) / inner[way] if inner[way] > 1 else once]
    turns = [way for way in made if not _hopeless(found, way)]
    figure = min(FIGURE, max(end - now(), 0.0) / (len(turns) * (ROUNDS[0] + 1)))
    for way in turns:
        inner[way] = max(1, round(figure / max(found[way].pop(), 1e-7)))
    for i in range(ROUNDS[1]):
        if i >= ROUNDS[0] and now() >= end:
            break
        first = i % len(turns)
        for way in turns[first:] + turns[:first]:
            made[way](1)
            found[way].append(made[way](inner[way]) / inner[way])
    return found


def _hopeless(found: Figures, way: str) -> bool:
    times, seconds = HOPELESS
    return found[way][0] > max(times * found[FLOAT32][0], seconds)


def _medians(found: Figures) -> dict[str, float]:
    return {way: statistics.median(taken) for way, taken in found.items()}


def _within(
    product: Product, bench: Bench, found: Mapping[Product, Figures], share: float
) -> Product | None:
    """A product, or a smaller one of its form, that takes no more than its share of the time."""
    while found:
        near = min(found, key=lambda other: distance(product, other))
        times = max(product.flops / near.flops, _work(product) / _work(near))
        once = times * sum(_medians(found[near]).values())
        if once * (3 + ROUNDS[0]) <= 1.5 * share and product.values <= LARGEST:
            break
        sizes = [product.m, product.k, product.n]
        if product.op != "matmul" or product.batch > 1 or max(sizes) == 1:
            return None
        largest = sizes.index(max(sizes))
        sizes[largest] = -(-sizes[largest] // 2)
        product = bench.linear(*sizes)
    return product


def _measured(product: Product, found: Figures) -> Timed:
    """The medians of figures, and the quartiles of the paired ratios to float32."""
    seconds = _medians(found)
    spread = {}
    for way, taken in found.items():
        paired = len(taken) == len(found[FLOAT32])
        base = found[FLOAT32] if paired else [seconds[FLOAT32]]  # one figure of a hopeless way
        ratios = sorted(a / b for a, b in zip(taken, base, strict=True))
        quarter = len(ratios) // 4
        spread[way] = ratios[quarter], ratios[-1 - quarter]
    return Timed(product, seconds, spread)


def _scaled(product: Product, smaller: Product, found: Figures) -> dict[str, float]:
    """The times of a smaller product of the same form, as many times as it has fewer FLOPs."""
    times = product.flops / smaller.flops
    return {way: seconds * times for way, seconds in _medians(found).items()}


def _told(product: Product, seconds: Mapping[str, float], off: float) -> Timed:
    """Times that were not measured, whose ratios may be off by a factor."""
    ratios = {way: took / seconds[FLOAT32] for way, took in seconds.items()}
    return Timed(product, seconds, {w: (r / off, r * off) for w, r in ratios.items()}, False)
