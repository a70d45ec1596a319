"""How far two runs of one function may differ if they differ by rounding alone.

    every rounding moves a number by             s a,  with s even in [-1, 1]
    the result v of an op with k terms t         a = (u + f u') |v| + u' sqrt(k / 3 (v^2 + sum t^2))
    a first-order change of the output           e = sum over roundings of  J s a
    with the s independent, by chance            |e| > L sqrt(sum (J a)^2 / 3)
    with a probability of at most                2 exp(-L^2 / 2)

`u` is the unit roundoff of the result's dtype, half the distance from 1 to the next number, and
`u'` that of the dtype that the op computes in. `f` is FUNCTION for functions, HARD for a few, and 0
for arithmetic that is rounded once. The last part of `a` is there for sums alone, `k` is 1
elsewhere. `J` is how much the output changes with the number.

A sum: each of its additions rounds a partial sum, by an even share of u' times its magnitude. Terms
that are added one after the other in a random order have partial sums whose squares add up, in the
mean over orders, to k (v^2 / 3 + sum t^2 / 6). For a product the terms are products of two numbers.

`J` is measured, not assumed. A probe is one more run of the same program in which every op's
result is moved by an even share of `a`, up or down. Over probes, the mean square of the changes is
the sum of (J a)^2 / 3 over all roundings. It contains the number of ops, the dtypes, the lengths of
sums, and how the rest of the program magnifies or damps each rounding, forward and backward. Equal
numbers in one result round alike, and are moved alike; opposite ones are moved in opposite ways.
Two runs are two sets of roundings: their squares are added.

This is a model and not a bound. It takes for granted:
- Numbers that are not equal to 16 bits round independently, and neighbours alike. FUNCTION is a few
  times the mean error of a function's polynomial, and covers the sums of softmax and norms.
- The order of a sum does not sort its terms: ten thousand positive numbers before as many negative
  ones have larger partial sums. Kernels that add in lanes or in pairs round less than this.
- Roundings act to first order, and some probes tell the mean square of the change: of a single
  number, 16 in each framework do so within a factor of two; of an array the largest counts.
That no alarm is false is tested, on 31 ops and a transformer block with a thousand seeds; so is
that the tolerance is at most 30 times the largest error seen there in float32.

Sources: one rounding, Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., SIAM 2002,
theorem 2.2; sums and their partial sums, section 4.2; roundings as even and independent, section
2.8; the bound, which holds for an even distribution with its own variance, Higham and Mary, "A new
approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41 (2019), theorem 2.4;
runs with moved results, Parker, "Monte Carlo arithmetic", UCLA CSD-970002, 1997. Nothing here knows
a framework.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from polymp.diagnostics.call_record import Call
from polymp.dtypes import FORMATS
from polymp.rules.vocabulary import vocabulary

# The probability of a false alarm, for all numbers of one result together.
CHANCE = 1e-6

# Units roundoff of a function's own error, 1.5 in the last place: SLEEF, whose functions torch
# calls, documents 1 for those, and XLA's polynomials are off by 1 to 3 at the worst.
FUNCTION = 3.0

# The same of the gamma functions and inverses, whose approximations cancel digits on the way.
HARD = 32.0
HARD_FUNCTIONS = frozenset("lgamma digamma polygamma igamma igammac erfinv".split())

# An index, or x > 0, turns where a number is as near to another as its rounding. Few probes show a
# choice that seldom turns: they choose from numbers that are moved so many times as far.
FARTHER = 10

# Logarithms of softmax beyond it, and scores, are a mask's: exp(-88) is zero.
MASK = 88.0

# Ops on floats that choose, as those do whose results are integers and bools.
STEPS = frozenset("round floor ceil trunc sign sgn heaviside floor_divide".split())

# Ops that are rounded once: IEEE 754 arithmetic, in float32 for the low dtypes.
ONCE = frozenset("add sub mul div sqrt reciprocal rsub".split())

# Ops whose results are among their operands, or these with another sign, or counts, and that are in
# no class of the vocabulary that moves numbers.
EXACT = frozenset(
    """
    neg abs relu relu6 hardtanh threshold sign floor ceil round trunc broadcast_to copy fill histc
    max_pool max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d threshold_backward select_backward slice_backward
    """.split()
)
# Ops that are in such a class, and multiply, add or interpolate.
_COMPUTE = frozenset(
    """
    dropout alpha_dropout feature_dropout feature_alpha_dropout embedding_bag quantile nanquantile
    """.split()
)

# Ops that make whole numbers of whole numbers, exactly: those that add, multiply and cast.
_WHOLE = frozenset(
    "add sub rsub mul sum mean cumsum prod cumprod add_any convert_element_type".split()
)
_WHOLE_KINDS = frozenset("matmul convolution accumulation".split())

# How an error of what an op reads shows in its result, by the op or else by its class: as the same
# share of its size, but for these.
_EFFECTS = {
    "added": "add sub rsub",  # it stays as large as it is
    # So it does or, of a small result, it is the same share of it.
    "absolute": "loss sin cos",
    "log": "log log2 log10 log1p logsumexp log_softmax tan",  # likewise; backward as "steep"
    "centred": "normalisation var std var_mean std_mean",  # a mean is subtracted first
    # Of a large number it is a large share of the result, as that of exp(100).
    "steep": "softmax attention power inverse special",
    "sloped": "activation",  # so it is, but a slope is at most about 1
    # In sums in places, of which a record has no terms, as the same share of the terms.
    "scattered": "accumulation nansum embedding_bag _embedding_bag _embedding_bag_forward_only",
    "unknown": "linear_algebra iteration custom",  # that of an inverse may be any
    "": "rsqrt reciprocal",
}
_EFFECT = {name: effect for effect, names in _EFFECTS.items() for name in names.split()}

# Where a number has another sign, or is no longer the largest, it has another derivative.
JUMPS = frozenset(
    "comparison pooling abs relu relu6 leaky_relu hardtanh threshold l1_loss sign".split()
)


def effect(op: str) -> str:
    """How errors of what an op reads show in its result, a key of `_EFFECTS`."""
    return _EFFECT.get(op, _EFFECT.get(vocabulary().op(op).kind, ""))


def exact(op: str) -> bool:
    """True if an op rounds nothing: its results are among its operands, or counts."""
    return op in EXACT or (vocabulary().op(op).kind in vocabulary().moving and op not in _COMPUTE)


def is_arithmetic(op: str) -> bool:
    """True if an op adds, multiplies or casts: see `whole`."""
    return op in _WHOLE or vocabulary().op(op).kind in _WHOLE_KINDS


def whole(x: Any, by: Any, read: Iterable[Any]) -> Any:
    """Where arithmetic that may round by so much is exact: whole numbers made of such."""
    # 1 + x is a whole number, too, if x is small. Where shapes differ, all have to be whole.
    found = (x.round() == x) & (by < 0.5)  # of larger ones a dtype has not all
    for other in read:
        same = other.round() == other
        found &= same if other.shape in ((), x.shape) else same.all()
    return found


def results(tree: object, of: str) -> dict[str, Any]:
    """Return the arrays that a function returned, by their paths; of numbers numpy's."""
    import numpy as np

    found = {}
    for path, x in flat(tree):
        if isinstance(x, (bool, int, float)) and not is_array(x):
            found[path] = np.asarray(x, "float32" if isinstance(x, float) else None)
        elif is_array(x):
            found[path] = x
        elif not isinstance(x, str):
            raise TypeError(
                f"the {of} function returns {type(x).__name__} as result{path}: return arrays, or "
                "tuples, lists and dicts of them."
            )
    if not found:
        raise TypeError(f"the {of} function returns nothing to compare: return arrays.")
    return found


# Unit roundoff of what GPUs round the float32 operands of a product to, where they are allowed to
# take TF32. Other formats have the names of dtypes.
TF32 = 2.0**-11


class Run(NamedTuple):
    """The results and gradients of a function as numpy arrays, with its calls."""

    results: dict[str, Any]  # by path; floats in float64
    gradients: dict[str, Any]  # of the float inputs, by path; float64
    dtypes: dict[str, str]  # of the results, by path
    calls: tuple[Call, ...] = ()


def unit_roundoff(dtype: str) -> float:
    """Half the distance from 1 to the next number of the dtype, or of TF32."""
    return TF32 if dtype == "tf32" else FORMATS[dtype].eps / 2


def of_operands(dtype: str) -> float:
    """How far a product moves, relative to itself, if it rounds two operands to the format."""
    return math.sqrt(2) * unit_roundoff(dtype) if dtype else 0.0


def movement(op: str, kind: str, out: str, terms: float = 1) -> tuple[float, float]:
    """Return the parts of one op's rounding: `u + f u'`, and `u' sqrt(k / 3)` for its sums."""
    if exact(op):
        return 0.0, 0.0
    inside = unit_roundoff("float64" if out == "float64" else "float32")
    once = op in ONCE or kind in ("matmul", "convolution")
    often = 0.0 if once else HARD if op in HARD_FUNCTIONS else FUNCTION
    own = unit_roundoff(out) + often * inside
    return own, math.sqrt(terms / 3) * inside if terms > 1 else 0.0


def factor(count: int) -> float:
    """L for the largest of so many numbers: 2 count exp(-L^2 / 2) = CHANCE."""
    return math.sqrt(2 * math.log(2 * max(count, 1) / CHANCE))


class Gap(NamedTuple):
    """The difference of two arrays, relative to the largest magnitude of the first."""

    what: str  # name of the arrays: "result['x']" or "gradient of [0]"
    error: float  # the largest difference
    tolerance: float  # the largest difference that rounding explains
    largest: float  # the magnitude itself

    @property
    def part(self) -> bool:
        """True if rounding does not explain it."""
        return not self.error <= self.tolerance

    @property
    def margin(self) -> float:
        """How many times larger the tolerance is than the error."""
        return self.tolerance / self.error if self.error else math.inf

    def __str__(self) -> str:
        if self.error == math.inf:
            return f"{self.what}: not equal where one of the two, or a probe, is Inf or NaN"
        sign = ">" if self.part else "<="
        return (
            f"{self.what}: off by {self.error:.3g} {sign} tolerance {self.tolerance:.3g}, relative "
            f"to the largest magnitude, {self.largest:.3g}"
        )


def gap(what: str, ours: Any, theirs: Any, spread: Any) -> Gap:
    """Compare two arrays of floats of one shape."""
    # Numbers have to be equal where one is not finite, where no rounding changes them, and where
    # the change is not known because a probe was not finite there.
    import numpy as np

    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    finite = np.isfinite(ours) & np.isfinite(theirs)
    kept = finite & np.isfinite(spread)
    largest = float(np.abs(ours[finite]).max(initial=0.0)) or 1.0
    if not np.all(same | kept):
        return Gap(what, math.inf, 0.0, largest)
    error = float(np.abs(ours[kept] - theirs[kept]).max(initial=0.0))
    limit = factor(ours.size) * float(spread[kept].max(initial=0.0))
    return Gap(what, error / largest, limit / largest, largest)


def spread(base: Any, probes: Iterable[Any]) -> Any:
    """Return the root mean square change of an array by the roundings of one run."""
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        squares = np.mean([(x - base) ** 2 for x in probes], 0)
    exact = np.all([np.isclose(x, base, 0, 0, equal_nan=True) for x in probes], 0)
    return np.sqrt(np.where(exact, 0.0, squares))


# Nested tuples, lists and dicts of arrays, of every framework: what has a dtype and a shape.


def is_array(x: object) -> bool:
    """True for numpy's, torch's and JAX's arrays."""
    return hasattr(x, "dtype") and hasattr(x, "shape")


def flat(tree: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with their paths, such as "[0]['x']"; None is no leaf."""
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from flat(tree[key], f"{path}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        for at, item in enumerate(tree):
            yield from flat(item, f"{path}[{at}]")
    elif tree is not None:
        yield path, tree


def arrays(tree: object) -> dict[str, Any]:
    """The arrays of a tree by their paths."""
    return {path: x for path, x in flat(tree) if is_array(x)}


def rebuilt(tree: Any, leaves: Iterator[Any]) -> Any:
    """A tree with other arrays, in the order of `arrays`."""
    if isinstance(tree, Mapping):
        made = {key: rebuilt(tree[key], leaves) for key in sorted(tree, key=str)}
        made = {key: made[key] for key in tree}
        return made if isinstance(tree, dict) else type(tree)(made)  # type: ignore[call-arg]
    if isinstance(tree, (list, tuple)):
        items = [rebuilt(item, leaves) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return next(leaves) if is_array(tree) else tree
