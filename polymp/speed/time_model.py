"""Times of matrix products that were not measured, predicted from those that were.

samples -> Model -> the times of a product
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

from polymp.speed.advice import FLOAT32, Product


class Model:
    """Predicts the times of a product from those of others.

        float32     (overhead + flops / rate + values / bandwidth) * the error of near samples
        other ways  float32's time * the ratio of near samples

    The three constants are the non-negative ones with the least squares of relative errors, at most
    half as many as there are samples; the others are zero. Errors, as factors, and ratios of
    samples are averaged geometrically; near samples count most, see `distance`.
    """

    def __init__(self, samples: Mapping[Product, Mapping[str, float]]) -> None:
        """Fit the constants."""
        self._samples = samples
        self._constants = _fit([(p, seconds[FLOAT32]) for p, seconds in samples.items()])

    def seconds(self, product: Product) -> dict[str, float]:
        """The times of a product, by way."""
        off = {p: taken[FLOAT32] / self._fitted(p) for p, taken in self._samples.items()}
        base = self._fitted(product) * _average(product, off)
        found = {FLOAT32: base}
        for way in dict.fromkeys(way for taken in self._samples.values() for way in taken):
            ratios = {p: t[way] / t[FLOAT32] for p, t in self._samples.items() if way in t}
            found[way] = base * _average(product, ratios)
        return found

    def _fitted(self, product: Product) -> float:
        made = sum(c * t for c, t in zip(self._constants, _terms(product), strict=True))
        return max(made, 1e-9)


def _average(product: Product, known: Mapping[Product, float]) -> float:
    weights = {p: (1 + distance(product, p)) ** -2 for p in known}
    pull = sum(weights[p] * math.log(value) for p, value in known.items())
    return math.exp(pull / sum(weights.values()))


def _terms(product: Product) -> tuple[float, ...]:
    return 1.0, float(product.flops), float(product.values)


def distance(one: Product, other: Product) -> float:
    """The squared distance of two products.

    A size that is twice as large is 1 away; so is a share of numbers that are cast that differs by
    a quarter. Another op is farther than any size.
    """
    sizes = sum(math.log2(a / b) ** 2 for a, b in zip(one[1:5], other[1:5], strict=True))
    cast = one.casts / one.values - other.casts / other.values
    return sizes + (4 * cast) ** 2 + 100 * (one.op != other.op)


def _fit(samples: Sequence[tuple[Product, float]]) -> tuple[float, ...]:
    """Non-negative constants of `_terms`: the best of the unbounded fits of all sets of terms."""
    rows = [[t / took for t in _terms(product)] for product, took in samples]
    best = math.inf
    constants: tuple[float, ...] = (0.0,) * 3
    for count in range(1, min(3, max(1, len(rows) // 2)) + 1):
        for chosen in combinations(range(3), count):
            found = _least_squares([[row[i] for i in chosen] for row in rows])
            if found is None or min(found) < 0:
                continue
            off = sum((sum(c * row[i] for c, i in zip(found, chosen, strict=True)) - 1) ** 2
                      for row in rows)  # fmt: skip
            if off < best * 0.98:  # a term more has to be worth it
                best = off
                by = dict(zip(chosen, found, strict=True))
                constants = tuple(by.get(i, 0.0) for i in range(3))
    return constants


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """x of least |rows x - 1|, by Gaussian elimination; None if it is not unique."""
    size = len(rows[0])
    scale = [math.sqrt(sum(row[i] ** 2 for row in rows)) for i in range(size)]
    if not all(scale):
        return None
    rows = [[v / s for v, s in zip(row, scale, strict=True)] for row in rows]
    system = [
        [sum(row[i] * row[j] for row in rows) for j in range(size)] + [sum(row[i] for row in rows)]
        for i in range(size)
    ]
    for i in range(size):
        at = max(range(i, size), key=lambda r: abs(system[r][i]))
        if abs(system[at][i]) < 1e-9:
            return None
        system[i], system[at] = system[at], system[i]
        for other in range(size):
            if other != i:
                factor = system[other][i] / system[i][i]
                pairs = zip(system[other], system[i], strict=True)
                system[other] = [a - factor * b for a, b in pairs]
    return [system[i][size] / system[i][i] / scale[i] for i in range(size)]
