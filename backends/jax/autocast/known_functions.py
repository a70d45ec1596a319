"""Which op of the vocabulary an equation is: by its primitive, or by the function that wrote it.

    spelling(eqn)   the primitive, with the variant that its parameters show
    Functions.of    the known functions that were running when the equation was traced

A function is known by its code: every equation keeps the traceback of its trace, and a jitted call
the place of its function. Nothing is patched, and a function need not leave a call in the trace:
`jax.nn.softmax` leaves nine bare equations. Libraries are looked at only if they are loaded.
"""

import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import NamedTuple

import jax
import jax.extend.core as core

from polymp.backends.jax import compat
from polymp.backends.jax.compat import ClosedProgram, Equation
from polymp.backends.jax.jaxprs import JITTED, RULED, ends_at_tolerance, inside
from polymp.errors import PolicyError, brief
from polymp.rules.vocabulary import vocabulary

# Checkpoint_names that mark a value, which is cast.
MARKS = UPPER, LOWER = "polymp:upper", "polymp:lower"


def spelling(eqn: Equation) -> str:
    """The equation's primitive as the vocabulary spells it."""
    name: str = eqn.primitive.name
    if name == "name" and eqn.params["name"] in MARKS:
        return "convert_element_type"
    variant = _VARIANTS.get(name)
    return name if variant is None else name + variant(eqn)


def op_of(spelled: str) -> str:
    """The op of a spelling, or of the primitive where the variant is not listed; "" if none."""
    words = vocabulary()
    return words.of_jax(spelled) or words.of_jax(spelled.partition(":")[0])


# What a product that adds nothing up is called: all that it would sum over has size 1.
_UNSUMMED = ":unsummed"


def _product(eqn: Equation) -> str:
    params = eqn.params
    ragged = params.get("ragged_dot_dimension_numbers")
    numbers = params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    (contracted, _), (batch, _) = numbers
    if all(eqn.invars[0].aval.shape[d] == 1 for d in contracted):
        return _UNSUMMED
    batched = batch or ragged is not None or max(len(v.aval.shape) for v in eqn.invars) < 2
    return "" if batched else ":unbatched"


def _convolution(eqn: Equation) -> str:
    params = eqn.params
    _, *summed = params["dimension_numbers"].rhs_spec  # behind the dimension of output channels
    if all(eqn.invars[1].aval.shape[d] == 1 for d in summed):
        return _UNSUMMED
    transposed = any(d != 1 for d in params["lhs_dilation"])
    return f":{'transpose' if transposed else ''}{len(params['window_strides'])}d"


_VARIANTS: dict[str, Callable[[Equation], str]] = {
    "dot_general": _product,
    "ragged_dot_general": _product,
    "conv_general_dilated": _convolution,
    "while": lambda eqn: ":tolerance" if ends_at_tolerance(eqn) else "",
    "integer_pow": lambda eqn: ":negative" if eqn.params["y"] < 0 else "",
    "div": lambda eqn: ":of_number" if isinstance(eqn.invars[0], core.Literal) else "",
}


class Found(NamedTuple):
    """A known function that an equation was traced in."""

    op: str  # its name in the vocabulary
    call: object  # what tells a call of it in one place from those in others: the frames around it
    # What tells the equation from others of the call: frames inside, primitive, types.
    inside: object


class Functions:
    """The known functions, by their code."""

    def __init__(self) -> None:
        # Names in the vocabulary, by the identity of a code object; and the same by file, first
        # line and name of a function.
        self.ops: dict[int, str] = {}
        self.places: dict[tuple[str | None, int | None, str], str] = {}
        self._borders: set[int] = set()
        self._looked: set[str] = set()
        self._codes: list[CodeType | None] = []  # so that no other object takes their identities

    def add(self, function: object, op: str) -> None:
        """Know a function as an op."""
        if isinstance(function, jax.numpy.ufunc):  # leaves no frame, but a call of its own
            numbers = [1.0] * function.nin
            for eqn in jax.make_jaxpr(function)(*numbers).eqns:
                for closed in _called(eqn):
                    self.places[compat.traced_from(closed)] = op
            return
        code = code_of(function)
        if code is None:
            raise TypeError(f"{function!r} is no Python function: it has no code to know it by")
        self._codes.append(code)
        self.ops[id(code)] = op
        self.places[code.co_filename, code.co_firstlineno, code.co_name] = op

    def refresh(self) -> None:
        """Look up the vocabulary's functions in the libraries that are loaded by now."""
        for dotted, op in vocabulary().functions.items():
            if dotted in self._looked or dotted.partition(".")[0] not in sys.modules:
                continue
            function = resolved(dotted)
            if function is not None:
                self._looked.add(dotted)
                self.add(function, op)

    def of(self, eqn: Equation) -> Iterator[Found]:
        """The known functions around an equation, from the outermost inwards."""
        codes, places = compat.frames(eqn.source_info.traceback)
        ids = [*map(id, codes)]
        outside = self.ops.keys().isdisjoint(ids)
        if outside and eqn.primitive.name not in _NAMED_OR_LOOP:
            return
        end = next((at for at, one in enumerate(ids) if one in self._borders), len(ids))
        for at in () if outside else range(end - 1, -1, -1):
            if ids[at] in self.ops:
                outer = tuple(ids[at:end]), tuple(places[at + 1 : end])
                types = [v.aval for v in (*eqn.invars, *eqn.outvars)]
                inner = tuple(ids[:at]), tuple(places[: at + 1]), eqn.primitive, types
                yield Found(self.ops[ids[at]], outer, inner)
        for closed in _called(eqn):
            if op := self.places.get(compat.traced_from(closed)):
                yield Found(op, id(eqn), None)
        if op_of(spelling(eqn)) == _LOOP:
            yield Found(_LOOP, id(eqn), None)

    def border(self, function: object) -> None:
        """Frames outside of this function do not count: they called the region, not an op."""
        code = code_of(function)
        if id(code) not in self._borders:
            self._codes.append(code)
            self._borders.add(id(code))


def _called(eqn: Equation) -> list[ClosedProgram]:
    """The jaxpr of a call that keeps its function's name, if the equation is one."""
    return [one.closed for one in inside(eqn)] if eqn.primitive.name in _NAMED else []


_NAMED = JITTED | RULED
_NAMED_OR_LOOP = _NAMED | {"while"}

# The op of a loop of the user's that is what a solver's is.
_LOOP = "while_loop"

# Where wrappers keep what they wrap: functools, jax's custom_jvp and custom_vjp, functools.partial,
# bound methods.
_WRAPPED = ("__wrapped__", "fun", "func", "__func__")


def code_of(function: object) -> CodeType | None:
    """The code of a function under all that may be wrapped round it, or None."""
    while True:
        inside = (getattr(function, name, None) for name in _WRAPPED)
        inner = next((f for f in inside if callable(f)), None)
        if inner is None:
            return getattr(function, "__code__", None)
        function = inner


def resolved(dotted: str) -> object:
    """The function of a dotted name, by way of modules that are loaded; None if they are not."""
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):
        found = sys.modules.get(".".join(parts[:end]))
        if found is not None:
            for name in parts[end:]:
                found = getattr(found, name, None)
            return found
    return None


def spelled(given: object, where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Spell an object that a user registers as the vocabulary does."""
    if isinstance(given, core.Primitive):
        if given.name in FREE | OPAQUE or op_of(given.name):
            raise PolicyError(
                f"{where}: {given.name!r} is jax's own. Give it a rule in a policy instead."
            )
        return (given.name,), ()
    code = code_of(given) if callable(given) else None
    if code is None:
        raise TypeError(
            f"{where}: jax={brief(given)} is no op. Give a primitive, or a function written with "
            "def: plain, jitted, jax.custom_jvp or jax.custom_vjp."
        )
    FUNCTIONS.refresh()
    if FUNCTIONS.ops.get(id(code)):
        raise PolicyError(f"{where}: {given!r} is known already, as {FUNCTIONS.ops[id(code)]!r}.")
    dotted = f"{given.__module__}.{code.co_qualname}"
    if op := vocabulary().functions.get(dotted):
        raise PolicyError(
            f"{where}: another function {dotted!r} is registered, as {op!r}. Give this one a name "
            "of its own, by `def`."
        )
    return (), (dotted,)


FUNCTIONS = Functions()

# With which float dtypes JAX's primitives can do what. One that no set here names runs in the
# dtypes that the program was written in: that is always right, at worst slower.
#
# Sums of products of two operands: the ones that units for low dtypes are built for.
CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})

# polymp's own primitives for them, which say in `of` which of them each stands for.
OURS = frozenset({"polymp_contraction", "polymp_fp8_contraction"})

# Compute in any float dtype, and return the dtype of their float operands, which must agree.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul ne neg
    one_minus_square polygamma pow regularized_incomplete_beta rem round rsqrt select_n sign sin
    sinh sqrt square sub tan tanh zeta
    """.split()
)

# Move numbers and change none of them.
LAYOUT = frozenset(
    """
    broadcast_in_dim copy dynamic_slice name
    reshape reshard rev sharding_constraint slice squeeze stop_gradient tile transpose
    """.split()
)

# Reductions, and what moves numbers from several operands.
_OTHERS = frozenset(
    """
    argmax argmin concatenate cumlogsumexp cummax cummin cumprod cumsum dynamic_update_slice gather
    pad reduce_max reduce_min reduce_prod reduce_sum reduce_window_max reduce_window_min
    reduce_window_sum scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub
    select_and_scatter_add split stack top_k unstack
    """.split()
)

# Each result has the dtype of the operand in its place; the operands need not agree.
INDEPENDENT = frozenset(
    """
    all_gather all_gather_invariant all_to_all device_put optimization_barrier pbroadcast pcast
    pmax pmin ppermute psum psum2 psum_invariant pvary reduce_scatter sort
    unreduced_psum
    """.split()
)

FREE = CONTRACTIONS | ELEMENTWISE | LAYOUT | _OTHERS | INDEPENDENT

# Hold a program of their own that is not the user's to rewrite: run as written, without a word.
OPAQUE = frozenset(
    """
    composite core_map custom_linear_solve custom_partitioning custom_vmap_call debug_callback
    debug_print ffi_call io_callback linear_call linear_solve mpmd_map pallas_call pure_callback
    reduce reduce_window run_state select_and_scatter tpu_custom_call triton_kernel_call
    """.split()
)
