"""`explain`: which op runs in which dtype, and why, read off the traced program.

What is reported is what is in the program that runs, forward and backward, with the row that
decided it.
"""

import reprlib
from collections.abc import Callable

import jax

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import is_symbol
from polymp.backends.jax.autocast.api import PolicyLike, autocast
from polymp.backends.jax.diagnostics.program_calls import with_sites
from polymp.backends.jax.diagnostics.traced_call import parameters, traced
from polymp.backends.jax.modules import nnx
from polymp.diagnostics.report import Report


def explain(
    fn: Callable[..., object],
    *args: object,
    dtype: jax.typing.DTypeLike | None = None,
    policy: PolicyLike = None,
    **kwargs: object,
) -> Report:
    """Report which op runs in which dtype, and why: a row for each op call site.

        report = explain(loss, params, x, dtype="bfloat16")
        report = explain(train_step, params, opt_state, x)     # the regions are the program's own

    The function is traced and not run; what is reported is the program that would run. Its
    derivatives are in it where it takes them: `jax.grad(autocast(loss))`, or a whole train step.
    Bytes of float32 kept for backward are counted there; a program without a backward pass keeps
    none.

    Args:
        fn: a function of arrays, pytrees of them and flax modules; jitted or not. An nnx module,
            or a method of one, is called by its paths.
        args: of the call; arrays, or `jax.ShapeDtypeStruct` in their places.
        dtype: the low dtype of an autocast that is put around the function, bfloat16 or float16;
            None to put none, unless a policy is given.
        policy: of that autocast.
        kwargs: of the call.

    Returns:
        The report; its rows are worked out when they are asked for. A symbolic size, as in an
        export, counts as 1 in its FLOPs and bytes, and its title says so.

    Raises:
        TypeError: `fn` is not callable, or `dtype` no dtype.
    """
    if not callable(fn):
        raise TypeError(
            f"explain(fn, *args) needs a function or a module, got {reprlib.repr(fn)}. Give the "
            "function and its arguments, not what it returned."
        )
    if "device" in kwargs and "device" not in parameters(fn):
        raise TypeError(
            f"explain(device={kwargs['device']!r}): in JAX the table is the same on every device. "
            "Leave it out."
        )
    title = getattr(fn, "__name__", None) or type(fn).__name__
    if dtype is not None or policy is not None:
        fn, args = nnx.owned(fn, args)
        fn = autocast(fn, dtype="bfloat16" if dtype is None else dtype, policy=policy)
    closed, record, *_ = traced(fn, args, kwargs)
    given = (var.aval for var in compat.binders(closed)[1])
    sizes = (n for aval in given for n in getattr(aval, "shape", ()))
    if symbols := {str(n): None for n in sizes if is_symbol(n)}:
        title += f" (FLOPs and bytes for {' = '.join(symbols)} = 1)"
    low = next((f.low for f in record.calls.values() if f.low), "")
    rows = lambda: (call for call, _ in with_sites(closed, record))  # noqa: E731
    return Report(rows, title, low, record.policy)
