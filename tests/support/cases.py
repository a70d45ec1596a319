"""The behaviour of autocast, op by op: one table for both frameworks.

An `Op` names the function and the inputs, and how it runs in torch and in JAX. `rows` multiplies it
by input dtypes, region dtypes and nestings to `Case`s, each of which names the dtype that comes
out; where the two frameworks differ, it says why. `bound` says how far a result may be from the
exact one. Nothing here knows a framework.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from polymp.dtypes import FORMATS, widest

LOW = ("bfloat16", "float16")
OTHER = {"bfloat16": "float16", "float16": "bfloat16"}

# How an op runs in an enabled region.
LOWER = "lower"  # in the region's dtype
FP32 = "fp32"  # in float32
KEEP = "keep"  # in its inputs' dtypes, the widest where they differ
WIDEST = (
    "widest"  # in the widest of its inputs' dtypes and the region's; torch refuses the other half
)
BOOL = "bool"  # in its inputs' dtypes; truth values come out
INT = "int"  # in its inputs' dtypes; integers come out
FIRST = "first"  # in the dtype of its first input
NO_LOW = "no low"  # in its inputs' dtypes, of which it refuses the low ones
FORBID = "forbid"  # not at all
WRITTEN = "written"  # in the dtypes that its inputs had before the region
STATE = "state"  # in the region's dtype, and then in that of a state where this is wider
RAISES = "raises"  # in place of a dtype
TORCH, JAX = "torch", "jax"
OFF = "off"  # in place of a region's dtype


class Arg(NamedTuple):
    """One argument.

    All floats are multiples of 1/16 of at most 6 digits: no dtype rounds them.
    """

    kind: str  # the range that its numbers come from, or what they stand for
    shape: tuple[int, ...]  # of the array
    high: int = 0  # what indices are below

    @property
    def is_float(self) -> bool:
        return self.kind not in ("index", "sign", "mask")


def _of(kind: str) -> Callable[..., Arg]:
    return lambda *shape: Arg(kind, shape)


grid, positive, unit, share, large = map(_of, ("grid", "positive", "unit", "share", "large"))
sign, mask = map(_of, ("sign", "mask"))


def regular(n: int) -> Arg:
    return Arg("regular", (n, n))


def index(high: int, *shape: int) -> Arg:
    return Arg("index", shape, high)


class Op(NamedTuple):
    """A function that both frameworks have."""

    name: str  # in both frameworks' `ops`
    args: tuple[Arg, ...]  # what it is called with
    torch: str  # how it runs in torch
    jax: str = ""  # how it runs in JAX, if not alike
    why: str = ""  # the reason if not
    # how it runs in JAX on arrays that are low before the region, if not like others
    given: str = ""
    why_given: str = ""  # the reason then
    # how many times the low dtype's unit roundoff of the largest number in sight a result may be
    # off by: for each rounding on the way, by how much the rest magnifies it
    roundings: int = 1
    low_inside: str = ""  # the framework with such roundings although float32 comes out
    only: tuple[str, ...] = ()  # the patterns of dtypes it is called with; empty for all


# Dtypes of the float arguments in order; the last one stands for all that follow. "low" is the
# region's, "other" the other half; "made" is a float32 array that a matrix product in the region
# has turned low.
PATTERNS: dict[str, tuple[str, ...]] = {
    "float32": ("float32",),
    "low": ("low",),
    "made": ("made",),
    "other": ("other",),
    "float64": ("float64",),
    "low, float32": ("low", "float32"),
    "float32, low": ("float32", "low"),
    "made, float32": ("made", "float32"),
    "float32, made": ("float32", "made"),
    "low, other": ("low", "other"),
}
MAIN = ("float32", "low", "made")  # with both regions; of the others each with one of them
ALIKE = tuple(name for name, dtypes in PATTERNS.items() if len(dtypes) == 1)

# For functions of jax.lax, which refuse arrays of different dtypes.
NO_MIX = (*ALIKE, "made, float32", "float32, made")

# Why the frameworks differ.
ELEMENTWISE = "elementwise in JAX, where products that are not contractions keep their dtype"
CONTRACTION = "one dot_general in JAX, as every matrix product is"
IS_SUM = "a sum in JAX, and sums have a row"
WINDOW = "in JAX a sum over a window, which float16 may not hold, and a quotient"
NEEDED = "the next op needs what a low dtype does not hold of its result, and amp has a row for it"
NO_KERNEL = "torch has no low kernel of it"
LINALG = "torch has no row and no low kernel; JAX runs linear algebra as written"
LINALG_ALL = "torch has no row and no low kernel; amp, JAX's default, has a row for it"
LINALG_ROW = "torch-cpu has a row of it; JAX runs linear algebra as written"
CASTS_BACK = "jax.numpy casts back to the dtype it was given: an explicit cast counts"
PROMOTES = "jax.numpy promotes what is declared, 0-d arrays too, before autocast sees it"
AS_WRITTEN = "a region that is off runs what is written, and float32 is: torch keeps what it finds"
BIAS = "a float32 argument added to a low product is its bias in JAX"
OWN_ADD = "the bias is added by an op of its own in JAX; low in another dtype, it is no parameter"
HALVES = "torch refuses the half dtype that is not the region's; JAX's table widens"
ADDS_UP = "JAX adds up in float32, and the result has the array's dtype"
FOLLOWS = "in JAX, what is written into an array takes the array's dtype"
CHOSEN = "torch.where makes a float32 tensor of two numbers; in JAX they follow what they meet"
NO_CELL = "JAX has no kernel for the cell: a state in float32 meets low gates and stays float32"

# An op whose result jax.numpy casts back.
Back = partial(Op, given=KEEP, why_given=CASTS_BACK)
X, V = grid(3, 4), grid(4)
PAIR = (X, grid(3, 4))

# Without a low kernel, they run in float32 on a CPU, by the rows of torch-cpu; on CUDA they raise.
CPU_ROWS: dict[str, Any] = {
    "inv": (regular(3),),
    "eigvalsh": (regular(3),),
    "cond": (regular(3),),
    "solve": (regular(3), grid(3, 2)),
    "cholesky_solve": (grid(3, 2), regular(3)),
}

OPS: tuple[Op, ...] = (
    # Matrix products
    Op("matmul", (X, grid(4, 5)), LOWER),
    Op("mm", (X, grid(4, 5)), LOWER),
    Op("bmm", (grid(2, 3, 4), grid(2, 4, 3)), LOWER),
    Op("mv", (X, V), LOWER),
    Op("addmm", (grid(3, 5), X, grid(4, 5)), LOWER, roundings=2),
    Op("addmv", (grid(3), X, V), LOWER, roundings=2),
    Op("addr", (X, grid(3), V), LOWER, KEEP, ELEMENTWISE, roundings=2, low_inside=JAX),
    Op("addbmm", (grid(3, 3), grid(2, 3, 4), grid(2, 4, 3)), LOWER, roundings=2),
    Op("baddbmm", (grid(2, 3, 3), grid(2, 3, 4), grid(2, 4, 3)), LOWER, roundings=2),
    Op("linear", (X, grid(5, 4), grid(5)), LOWER, roundings=2),
    Op("linear without bias", (X, grid(5, 4)), LOWER),
    Op("einsum", (X, grid(4, 5)), LOWER),
    Op("linalg_multi_dot", (X, grid(4, 5), grid(5, 2)), LOWER, roundings=16),
    Op("linalg_vecdot", PAIR, LOWER),
    # Convolutions
    Op("conv1d", (grid(2, 3, 6), grid(4, 3, 3)), LOWER, only=NO_MIX),
    Op("conv1d with bias", (grid(2, 3, 6), grid(4, 3, 3), grid(4)), LOWER, roundings=2,
       only=NO_MIX),
    Op("conv2d", (grid(1, 2, 4, 4), grid(3, 2, 2, 2)), LOWER, only=NO_MIX),
    Op("conv3d", (grid(1, 2, 3, 3, 3), grid(3, 2, 2, 2, 2)), LOWER, only=NO_MIX),
    Op("conv_tbc", (grid(6, 2, 3), grid(3, 3, 4), grid(4)), LOWER, roundings=2,
       only=NO_MIX),
    Op("depthwise conv1d", (grid(2, 3, 6), grid(3, 1, 3)), LOWER, only=NO_MIX),
    Op("conv_transpose1d", (grid(2, 3, 4), grid(3, 2, 3)), LOWER, only=NO_MIX),
    Op("conv_transpose2d", (grid(1, 2, 3, 3), grid(2, 3, 2, 2)), LOWER, only=NO_MIX),
    Op("conv_transpose3d", (grid(1, 2, 2, 2, 2), grid(2, 2, 2, 2, 2)), LOWER, only=NO_MIX),
    # Attention and cells
    Op("attention", (grid(1, 2, 3, 4),) * 3, LOWER, roundings=8,
       only=("float32", "made", "float64")),
    *(
        Op(name, (grid(2, 3), unit(2, 4), unit(4, 3), unit(4, 4), unit(4), unit(4)), LOWER,
           roundings=8)
        for name in ("rnn_tanh_cell", "rnn_relu_cell")
    ),
    Op("gru_cell", (grid(2, 3), unit(2, 4), unit(12, 3), unit(12, 4), unit(12), unit(12)), LOWER,
       STATE, NO_CELL, roundings=16, low_inside=JAX),
    Op("lstm_cell", (grid(2, 3), unit(2, 4), unit(2, 4), unit(16, 3), unit(16, 4), unit(16),
       unit(16)), LOWER, STATE, NO_CELL, roundings=16, low_inside=JAX),
    Op("prelu", (X, unit(1)), LOWER, KEEP, ELEMENTWISE),
    # Powers, exponentials and logarithms
    *(Op(name, (X,), FP32) for name in ("cosh", "exp", "expm1", "sinh", "softplus", "tan")),
    *(
        Op(name, (positive(3, 4),), FP32)
        for name in ("log", "log10", "log1p", "log2", "reciprocal", "rsqrt")
    ),
    *(Op(name, (unit(3, 4),), FP32) for name in ("acos", "asin", "erfinv")),
    Op("number ** x", (X,), FP32),
    Op("x ** 1.5", (positive(3, 4),), FP32),
    Op("x ** 2", (X,), FP32),
    Op("x ** y", (positive(3, 4), X), FP32),
    # Softmax, normalisations, norms
    Op("softmax", (X,), FP32),
    Op("log_softmax", (X,), FP32),
    Op("logsumexp", (X,), FP32),
    Op("layer_norm", (X, V, V), FP32),
    Op("rms_norm", (X, V), FP32),
    Op("group_norm", (grid(2, 4, 3), V, V), FP32),
    Op("renorm", (X,), FP32),
    Op("cdist", (X, grid(2, 4)), FP32),
    Op("pdist", (X,), FP32),
    Op("dist", PAIR, FP32),
    Back("cosine_similarity", PAIR, FP32),
    Op("norm", (X,), FP32),
    Op("norm of rows", (X,), FP32),
    Op("linalg_matrix_norm", (X,), FP32),
    Op("linalg_matrix_norm of order 1", (X,), FP32),
    Op("linalg_vector_norm", (X,), FP32),
    # Losses
    *(Back(name, PAIR, FP32) for name in ("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss")),
    Back("nll_loss", (X, index(4, 3)), FP32),
    Back("nll_loss2d", (grid(2, 4, 3, 2), index(4, 2, 3, 2)), FP32),
    Back("cross_entropy", (X, index(4, 3)), FP32,
       low_inside=TORCH),  # it names the logits' dtype to log_softmax, and an explicit one counts
    Back("binary_cross_entropy", (share(3, 4), share(3, 4)), FORBID, FP32,
       "torch's table forbids it, as its gradient overflows; JAX has logarithms, with rows"),
    Back("binary_cross_entropy_with_logits", (X, share(3, 4)), FP32),
    Back("kl_div", (X, share(3, 4)), FP32),
    Back("hinge_embedding_loss", (X, sign(3, 4)), FP32),
    Back("margin_ranking_loss", (*PAIR, sign(3, 4)), FP32),
    Back("cosine_embedding_loss", (*PAIR, sign(3)), FP32),
    Back("multi_margin_loss", (X, index(4, 3)), FP32),
    Back("poisson_nll_loss", PAIR, FP32),
    Back("soft_margin_loss", (X, sign(3, 4)), FP32),
    Back("triplet_margin_loss", (*PAIR, grid(3, 4)), FP32),
    # Sums and products along an axis
    Back("sum", (X,), FP32),
    Back("sum of rows", (X,), FP32),
    Back("prod", (unit(3, 4),), FP32),
    Back("prod of rows", (X,), FP32),
    Op("cumsum", (X,), FP32),
    Op("cumprod", (X,), FP32),
    Op("logcumsumexp", (X,), KEEP, FP32, NEEDED),
    Back("mean", (X,), KEEP, FP32, IS_SUM),
    Back("var", (X,), KEEP, FP32, IS_SUM),
    Back("std", (X,), KEEP, FP32, IS_SUM),
    # Several inputs that must agree
    Op("addcdiv", (*PAIR, positive(3, 4)), WIDEST, KEEP, roundings=8, low_inside=JAX),
    Op("addcmul", (*PAIR, grid(3, 4)), WIDEST, KEEP, roundings=2, low_inside=JAX),
    Op("atan2", PAIR, WIDEST),
    Op("bilinear", (X, grid(3, 2), grid(5, 4, 2)), WIDEST, LOWER, CONTRACTION, roundings=16),
    Op("cross", (grid(3, 3), grid(3, 3)), WIDEST, roundings=4),
    Op("dot", (V, grid(4)), WIDEST, LOWER, CONTRACTION, roundings=4),
    Op("vdot", (V, grid(4)), WIDEST, LOWER, CONTRACTION, roundings=4),
    Op("tensordot", (X, grid(4, 5)), WIDEST, LOWER, CONTRACTION),
    Op("index_put", (grid(5, 4), grid(3, 4), index(5, 3)), WIDEST, FIRST, FOLLOWS, only=NO_MIX),
    Op("scatter_add", (grid(5, 4), grid(3, 4), index(5, 3, 4)), WIDEST, KEEP, ADDS_UP, roundings=3,
       only=NO_MIX),
    # Interpolation
    Op("upsample_nearest2d", (grid(1, 2, 3, 3),), FP32, KEEP, "moves numbers in JAX"),
    *(
        Op(name, (grid(*shape),), FP32, WRITTEN,
           "asks for the highest precision in JAX, and so runs as written", roundings=4)
        for name, shape in (
            ("upsample_linear1d", (1, 2, 3)),
            ("upsample_bilinear2d", (1, 2, 3, 3)),
            ("upsample_trilinear3d", (1, 1, 2, 3, 2)),
        )
    ),
    # No row in torch's lists
    *(Op(name, PAIR, KEEP) for name in ("add", "sub", "mul", "maximum", "minimum")),
    Op("div", (X, positive(3, 4)), KEEP),
    Op("x + number", (X,), KEEP, roundings=3),
    Op("x * number", (X,), KEEP),
    Op("number / x", (positive(3, 4),), FP32),
    Op("x - tiny number", (X,), KEEP, why="a number that float16 cannot hold takes float32 in JAX"),
    Op("x + 0-d array", (X, grid()), KEEP),
    *(Op(name, PAIR, BOOL) for name in ("eq", "lt", "ge")),
    Op("square", (X,), FP32),
    *(Op(name, (X,), KEEP) for name in ("neg", "abs", "sin", "cos", "atan", "asinh")),
    *(Op(name, (X,), KEEP) for name in ("floor", "round", "sign", "erf", "tanh")),
    Op("sqrt", (positive(3, 4),), KEEP),
    *(Op(name, (X,), KEEP, roundings=4) for name in ("sigmoid", "relu", "relu6", "leaky_relu")),
    *(Op(name, (X,), KEEP, roundings=8) for name in ("gelu", "gelu by tanh", "silu", "hardtanh")),
    *(Op(name, (X,), KEEP, roundings=4) for name in ("hardswish", "softsign", "glu")),
    *(Op(name, (X,), KEEP) for name in ("elu", "mish")),
    Op("logsigmoid", (X,), KEEP, FP32, NEEDED),
    *(Op(name, PAIR, KEEP, FP32, NEEDED) for name in ("logaddexp", "logaddexp2")),
    Op("exp2", (X,), KEEP, FP32, NEEDED),
    *(Op(name, (positive(3, 4),), KEEP) for name in ("i0e", "i1e")),
    *(Op(name, (positive(3, 4),), KEEP, FP32, NEEDED) for name in ("lgamma", "digamma")),
    Op("polygamma", (positive(3, 4),), KEEP, FP32, NEEDED),
    Op("gammainc", (positive(3, 4), positive(3, 4)), KEEP, FP32, NEEDED),
    Op("zeta", (large(3, 4), positive(3, 4)), NO_LOW, FP32, NO_KERNEL, only=ALIKE),
    *(Op(name, (X,), KEEP) for name in ("max", "min", "amax of rows", "clamp")),
    Op("argmax", (X,), INT),
    Op("masked to the lowest", (X, mask(3, 4)), KEEP),
    Op("where", (*PAIR, mask(3, 4)), KEEP),
    Op("x * integers", (X, index(4, 3, 4)), KEEP),
    Op("x * bools", (X, mask(3, 4)), KEEP),
    Op("x * chosen numbers", (X, mask(3, 4)), FP32, KEEP, CHOSEN),
    Op("cat", PAIR, KEEP),
    Op("stack", PAIR, KEEP),
    *(Op(name, (X,), KEEP) for name in ("pad", "reshape", "transpose", "slice", "flip", "triu")),
    Op("gather", (X, index(4, 3, 2)), KEEP),
    Op("embedding", (grid(5, 4), index(5, 3)), KEEP),
    *(Op(name, (X,), KEEP) for name in ("sort", "topk")),
    Op("max_pool1d", (grid(2, 3, 6),), KEEP),
    Op("avg_pool1d", (grid(2, 3, 6),), KEEP, FP32, WINDOW, roundings=2),
    # Linear algebra
    *(
        Op(name, args, NO_LOW, WRITTEN, LINALG, given=RAISES, only=NO_MIX)
        for name, args in (
            ("slogdet", (regular(3),)),
            ("matrix_exp", (unit(3, 3),)),
            ("lu_solve", (regular(3), grid(3, 2))),
        )
    ),
    *(
        Op(name, args, FP32, WRITTEN, LINALG_ROW, given=given, only=ALIKE)
        for name, args in CPU_ROWS.items()
        for given in ["" if name == "cholesky_solve" else RAISES]
    ),
    Op("solve_triangular", (regular(3), grid(3, 2)), NO_LOW, WRITTEN, LINALG, only=ALIKE),
    Op("det", (regular(3),), NO_LOW, FP32, LINALG_ALL),
    Op("pinv", (regular(3),), LOWER, WRITTEN,
       "made of products in torch, which run low; JAX runs linear algebra as written",
       roundings=16, only=("float32", "float64")),
)  # fmt: skip
BY_NAME = {op.name: op for op in OPS}

# Ops that are called in every nesting, at least one for each way to run.
NESTED = ("matmul", "linear", "exp", "softmax", "layer_norm", "addcmul", "add", "max", "lt")

# Regions from the outermost to the innermost; "on" is a region in the dtype of the case.
NESTINGS: dict[str, tuple[str, ...]] = {
    "on": ("on",),
    "off": ("off",),
    "off in on": ("on", "off"),
    "on in other": ("other", "on"),
    "on in off": ("off", "on"),
    "on in off in on": ("on", "off", "on"),
}


class Case(NamedTuple):
    """One call of an op, and the dtype that comes out."""

    op: str  # its name
    inputs: str  # the dtypes of its float arguments, a key of PATTERNS
    low: str  # the dtype of the region
    nesting: str  # a key of NESTINGS
    torch: str  # the dtype that comes out in torch, or "raises"
    jax: str  # the same in JAX
    why: str  # why these differ; empty if they do not

    def __str__(self) -> str:
        return f"{self.op}({self.inputs}) {self.low} {self.nesting}"

    @property
    def of(self) -> Op:
        return BY_NAME[self.op]

    @property
    def regions(self) -> tuple[str, ...]:
        named = {"on": self.low, "other": OTHER[self.low]}
        return tuple(named.get(kind, kind) for kind in NESTINGS[self.nesting])

    @property
    def made(self) -> tuple[bool, ...]:
        """For each argument, whether a product makes it low."""
        return tuple(f == "made" for f in _dtypes(self.of, self.inputs))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """For each argument, its dtype before the region; "int" or "bool" if it is no float."""
        named = {"made": "float32", "low": self.low, "other": OTHER[self.low]}
        return tuple(named.get(f, f) for f in _dtypes(self.of, self.inputs))


def _dtypes(op: Op, inputs: str) -> tuple[str, ...]:
    pattern, left = PATTERNS[inputs], 0
    found = []
    for arg in op.args:
        if arg.is_float:
            found.append(pattern[min(left, len(pattern) - 1)])
            left += 1
        else:
            found.append("bool" if arg.kind == "mask" else "int")
    return tuple(found)


def rows() -> Iterator[Case]:
    """Every case."""
    for op in OPS:
        floats = sum(arg.is_float for arg in op.args)
        patterns = [p for p, f in PATTERNS.items() if len(f) <= floats]
        for low in LOW:
            for inputs in op.only or patterns:
                if inputs in MAIN or low == LOW[zlib.crc32(f"{op.name} {inputs}".encode()) % 2]:
                    yield _case(op, inputs, low, "on")
            for nesting in [n for n in NESTINGS if n != "on"] if op.name in NESTED else []:
                for inputs in MAIN:
                    if inputs != "made" or NESTINGS[nesting][0] != "off":
                        yield _case(op, inputs, low, nesting)
        if op.name not in NESTED:
            yield _case(op, "float32", "bfloat16", "off in on")


def _case(op: Op, inputs: str, low: str, nesting: str) -> Case:
    case = Case(op.name, inputs, low, nesting, "", "", "")
    torch, jax = _in_torch(case), _in_jax(case)
    return case._replace(torch=torch, jax=jax, why="" if torch == jax else _why(case, torch, jax))


def _floats(case: Case) -> tuple[str, ...]:
    """The dtypes of the float arguments as they arrive at the op."""
    outer = case.regions[0]
    pairs = zip(case.dtypes, case.made, case.of.args, strict=True)
    return tuple(outer if made else f for f, made, arg in pairs if arg.is_float)


def _run(way: str, dtypes: Sequence[str], case: Case) -> str:
    """The dtype that comes out of an op that runs in that way."""
    if way in (BOOL, INT, RAISES):
        return way
    if "float64" in dtypes:
        return "float64"
    if case.regions[-1] == OFF:
        return widest(dtypes)
    if way == WIDEST:
        return widest((*dtypes, case.low))
    if way == FIRST:
        return dtypes[0]
    if way == STATE:
        return widest((dtypes[STATES[case.op]], case.low))
    return {LOWER: case.low, FP32: "float32"}.get(way) or widest(dtypes)


# Which argument is the state that the result is added to.
STATES = {"gru_cell": 1, "lstm_cell": 2}
# What is added is an op of its own in JAX.
BIASED = {"addmm": 0, "addmv": 0, "addbmm": 0, "baddbmm": 0, "linear": 2, "conv1d with bias": 2,
          "conv_tbc": 2, "rnn_tanh_cell": 4, "rnn_relu_cell": 4, "gru_cell": 4,
          "lstm_cell": 5}  # fmt: skip


def _in_torch(case: Case) -> str:
    dtypes, way = _floats(case), case.of.torch
    on = case.regions[-1] != OFF
    if way == FORBID:
        return RAISES if on else widest(dtypes)
    if way == NO_LOW and any(f in LOW for f in dtypes):
        return RAISES
    if way == WIDEST and on and OTHER[case.low] in dtypes[: 1 + (dtypes[0] != "float32")]:
        return RAISES
    if case.op == "x + 0-d array":
        dtypes = dtypes[:1]
    return _run(way, dtypes, case)


def _in_jax(case: Case) -> str:
    op, dtypes = case.of, _floats(case)
    way = op.jax or op.torch
    before = tuple(f for f, arg in zip(case.dtypes, op.args, strict=True) if arg.is_float)
    made = any(case.made)
    if op.given and not made and widest(before) in LOW and case.regions[-1] != OFF:
        way = op.given
    elif case.regions[-1] == OFF or way == WRITTEN:  # what was made low is float32 as written
        return _run(way, before, case)
    elif op.name == "add" and made:
        dtypes = case.regions[:1]
    elif op.name == "x + 0-d array" and made:
        dtypes = case.regions[:1]
    elif op.name == "x - tiny number" and made and case.low == "float16":
        way = FP32
    elif op.name in BIASED and "float64" not in dtypes:
        bias = BIASED[op.name]
        product = widest(f for at, f in enumerate(before) if at != bias)
        if before[bias] != product or (made and dtypes[bias] == OTHER[case.low]):
            way = FP32
    return _run(way, dtypes, case)


def _why(case: Case, torch: str, jax: str) -> str:
    op = case.of
    if case.regions[-1] == OFF:
        return AS_WRITTEN
    if op.why_given and not any(case.made):
        return op.why_given
    if torch == RAISES and op.torch == WIDEST:
        return HALVES
    if op.name in ("add", "x + 0-d array") and any(case.made):
        return BIAS
    if op.name in BIASED or op.name == "x + 0-d array":
        return PROMOTES if not any(case.made) else OWN_ADD
    return op.why


_RANGES = {"grid": (-32, 33), "positive": (4, 33), "unit": (-14, 15), "share": (2, 15),
           "large": (24, 49)}  # fmt: skip
# What no op here rounds more often to float32, library functions included.
_FLOAT32_ROUNDINGS = 64
# What no function of jax.numpy's here casts more often on its way.
_OWN_CASTS = 8


@cache
def values(name: str, seed: int = 0) -> tuple[Any, ...]:
    """The arguments of an op: the same ones in every case of it, others for another seed.

    With a seed, floats are not on the grid: every dtype rounds them, and none is zero.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()) + seed)
    made = tuple(_array(arg, rng) for arg in BY_NAME[name].args)
    if not seed:
        return made
    return tuple(x + rng.uniform(0, 1 / 16, x.shape) if x.dtype.kind == "f" else x for x in made)


def _array(arg: Arg, rng: np.random.Generator) -> Any:
    if arg.kind == "index":
        return rng.integers(arg.high, size=arg.shape)
    if arg.kind == "sign":
        return rng.choice([-1, 1], arg.shape)
    if arg.kind == "mask":
        return rng.random(arg.shape) < 0.5
    if arg.kind == "regular":  # symmetric, with eigenvalues near 1, 2, ...
        some = rng.integers(-2, 3, arg.shape)
        return (some + some.T) / 16 + np.diag(np.arange(1.0, len(some) + 1))
    return rng.integers(*_RANGES[arg.kind], arg.shape) / 16


def bound(case: Case, framework: str, out: str, exact: Any) -> float:
    """How far a result may be from the exact one.

    The inputs are exact in every dtype, so that all errors are the op's own: its roundings to the
    low dtype, if it makes any, and those to float32.
    """
    op = case.of
    inputs = [abs(x).max() for x in values(case.op) if x.dtype == np.float64]
    largest = max(1.0, float(np.abs(exact).max()), *inputs)
    roundoff = _FLOAT32_ROUNDINGS * FORMATS["float32"].eps / 2
    before = {f for f in case.dtypes if f in LOW}
    if out in LOW:
        roundoff += op.roundings * FORMATS[out].eps / 2
    elif op.low_inside == framework:
        roundoff += op.roundings * FORMATS[case.low].eps / 2
    if framework == JAX and before:
        # What is low before the region, jax.numpy's own functions may cast back on their way.
        roundoff += _OWN_CASTS * max(FORMATS[f].eps for f in before) / 2
    return roundoff * largest
