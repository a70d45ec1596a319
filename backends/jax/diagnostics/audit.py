"""`audit`: how large the numbers of a call are.

    audited = polymp.jax.audit(train_step)
    params, opt_state = audited(params, opt_state, x)      # what train_step returns, bit for bit
    print(audited.audit)

The function itself runs as it always does. Beside it runs a twin of its traced program, which hands
out nothing but measurements; they are read when somebody asks.
"""

import functools
import reprlib
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, NoReturn

import jax

from polymp import progress
from polymp.backends.jax import compat
from polymp.backends.jax.arrays import is_array
from polymp.backends.jax.diagnostics.audit_results import Run, read
from polymp.backends.jax.diagnostics.measured_call import MeasuredCall, measured
from polymp.backends.jax.diagnostics.traced_call import called
from polymp.backends.jax.diagnostics.update_watch import is_kept, sampled
from polymp.backends.jax.diagnostics.written_weights import Sampled, Written, written
from polymp.backends.jax.modules import nnx
from polymp.backends.jax.scaler.grad_scaler import GradScaler
from polymp.diagnostics.audit import Audit
from polymp.fp8.recipes import recipe_of
from polymp.rules import policy_files


class Audited:
    """A function that is measured whenever it is called; see `audit`.

    Attributes:
        fn: the function.

    Args:
        fn: the function.
        fp8: name of the recipe that is tried, "" for none.
        rounding: True to measure rounding errors.
    """

    def __init__(self, fn: Callable[..., object], fp8: str = "", rounding: bool = False) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self._fp8 = fp8
        self._rounding = rounding
        self._tried = policy_files.load("fp8").override(recipe=fp8) if fp8 else None
        self._programs: dict[Hashable, MeasuredCall] = {}
        self._weights: dict[Hashable, list[Written]] = {}
        self._measured: list[Run] = []
        self._written: list[tuple[int, Sampled]] = []  # with the number of the call
        self._read: tuple[int, Audit] | None = None

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Measure a call, then make it.

        Args:
            args: of the call.
            kwargs: likewise.

        Returns:
            What `fn` returns.

        Raises:
            TypeError: an argument is traced: an audit is of values.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise TypeError(
                f"audit({self.fn!r}) was called by code that is traced, where there are no values "
                "to measure. Audit the outermost function: polymp.jax.audit(jax.jit(step))."
            )
        types = tuple(jax.typeof(x) if is_array(x) else _kind(x) for x in leaves)
        key = tree, types, compat.trace_context(), nnx.shape_of((args, kwargs))
        if key not in self._programs:
            self._programs[key] = measured(
                self.fn, args, kwargs, tried=self._tried, rounding=self._rounding
            )
            arrays = self._programs[key].traced.arrays
            with progress.line("audit") as line:
                line.stage("compiling the program that measures")
                facts = self._programs[key].packed.run(arrays)
        else:
            leaves = jax.tree.leaves(called(self.fn, args, kwargs)[1:])
            arrays = [leaf for leaf in leaves if is_array(leaf)]
            facts = self._programs[key].packed.run(arrays)
        program = self._programs[key]
        self._measured.append(Run(program, facts, _scale_of((args, kwargs))))
        if key not in self._weights:  # the twin was run
            kept = is_kept((args, kwargs))
            self._weights[key] = [] if kept else written(program, arrays)
        weights = self._weights[key]
        before = sampled([arrays[w.before] for w in weights])  # fn may be given them to keep
        result = self.fn(*args, **kwargs)
        if weights:
            modules = nnx.among((args, kwargs))  # which fn has changed in place
            after = called(self.fn, args, kwargs)[1:] if modules else result
            left = [leaf for leaf in jax.tree.leaves(after) if is_array(leaf)]
            now = sampled([left[w.before if modules else w.after] for w in weights])
            self._written.append((len(self._measured) - 1, Sampled(weights, before, now)))
        return result

    @property
    def audit(self) -> Audit:
        """The audit of all calls so far. Waits for the device."""
        if self._read is None or self._read[0] != len(self._measured):
            found = read(self._measured, self._written, self._fp8)
            found.rounding = self._rounding
            self._read = len(self._measured), found
        return self._read[1]

    def __enter__(self) -> NoReturn:
        """Say how it is used."""
        raise TypeError(
            "polymp.jax.audit is not a context manager. Call what it returns in place of the "
            "function, audited = polymp.jax.audit(step), and read audited.audit."
        )

    def __exit__(self, *error: object) -> None:
        """Never reached; `with` asks for it first."""

    def __repr__(self) -> str:
        return f"audit({self.fn!r}), {len(self._measured)} calls measured"


def audit(fn: Callable[..., object], *, fp8: str | None = None, rounding: bool = False) -> Audited:
    """Wrap a function so that its numbers are measured at every call.

        audited = polymp.jax.audit(train_step)          # jitted or not; with its jax.grad inside
        for x in batches:
            params, opt_state = audited(params, opt_state, x)
        print(audited.audit)
        policy = audited.audit.suggest().apply("amp")

    `fn` itself is called as it is, so its results are what they are without, every bit of them.
    What is measured is a twin of its traced program: every op's result and every gradient, in loops
    and branches too. That program is compiled once for each set of types, and runs before `fn`; a
    call takes three to four times as long. Largest magnitudes, Inf and NaN are of all values;
    shares are of up to 2,048 values of each array, spread evenly, in a `while` loop of its last
    round.

    Gradients are found where the program takes them: they are what its backward pass hands to the
    rest of it. A `GradScaler` among the arguments says by which scale to divide them.

    With `fp8=`, the twin also measures what the products of bfloat16 regions would lose in 8 bits:
    those that the policy `fp8` would run so. Each of them is computed twice more, in float32.

    With `rounding=True`, the twin also measures rounding errors: of each op in a low dtype, against
    its last equation in float32 on the same inputs, and of each result, against the same call in
    float32, by a second twin.

    Args:
        fn: a function of arrays, pytrees and flax modules; the outermost one, which jax.jit or
            jax.grad may be inside of, and not around.
        fp8: name of the recipe to try: "tensorwise", "rowwise" or "rowwise_gw_hp"; None for none.
        rounding: True to measure rounding errors.

    Returns:
        The function, with the audit as its attribute `audit`.

    Raises:
        TypeError: `fn` is not callable.
        PolicyError: there is no such recipe.
    """
    if not callable(fn):
        raise TypeError(f"audit(fn) needs a function, got {reprlib.repr(fn)}.")
    return Audited(fn, "" if fp8 is None else recipe_of(fp8, "audit()").name, rounding)


class _Same(NamedTuple):
    """An object that cannot be hashed, and is only equal to itself."""

    it: object

    def __hash__(self) -> int:
        return id(self.it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.it is other.it


def _kind(leaf: object) -> Hashable:
    """A key for an argument that is no array: 1, 1.0, True, 0.0 and -0.0 have different ones."""
    try:
        hash(leaf)
    except TypeError:
        return _Same(leaf)
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf


def _scale_of(tree: object) -> jax.Array | float:
    """The scale of the first scaler among the arguments; 1 if there is none."""
    for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, GradScaler)):
        if isinstance(leaf, GradScaler) and leaf.enabled:
            scale: jax.Array = leaf.state.scale
            return scale
    return 1.0
