"""The functions for both backends: `polymp.explain` and `polymp.register_op`.

Each imports a backend when it is needed: `explain` the one that the function or its arguments
belong to, `register_op` the one of each spelling given.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from polymp import backends, dtypes
from polymp.errors import PolicyError
from polymp.rules.row import Rule, member
from polymp.rules.vocabulary import CUSTOM, Op, vocabulary

if TYPE_CHECKING:
    from polymp.diagnostics.report import Report


def explain(fn: Any = None, *args: object, **kwargs: Any) -> "Report":
    """Call a function and report the dtype that each of its ops runs in, and why.

        report = polymp.explain(model, x, dtype="bfloat16")
        print(report)

    A call with torch's tensors or modules is explained by `polymp.torch.explain`, any other by
    `polymp.jax.explain`, whose further arguments can be given here.

    Args:
        fn: a module or a function.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call, and of the backend's `explain`: `dtype`, the low
            dtype of a region around the call, by name, alias or as a dtype object; `policy`.

    Returns:
        The report, with a row for each op call site.

    Raises:
        TypeError: `fn` is not callable, nothing says which framework it is for, or `dtype` is
            neither a string nor a dtype.
        ValueError: `dtype` is no float dtype that is known.
    """
    if fn is None:
        raise TypeError(
            "polymp.explain(fn, *args) explains a call. For a block of torch code, write "
            "`with polymp.torch.explain() as report:`."
        )
    called = getattr(fn, "__name__", type(fn).__name__)
    name = framework_of(
        (fn, args, kwargs), None, f"polymp.explain({called}, ...)",
        "Call polymp.torch.explain or polymp.jax.explain.",
    )  # fmt: skip
    if kwargs.get("dtype") is not None:
        kwargs["dtype"] = dtypes.name(kwargs["dtype"], what="explain(): dtype")
    backend = importlib.import_module(f"polymp.backends.{name}.diagnostics.explain")
    report: Report = backend.explain(fn, *args, **kwargs)
    return report


_NAME_IT = 'Write framework="torch" or framework="jax".'


def framework_of(call: object, named: str | None, where: str, write: str = _NAME_IT) -> str:
    """The backend that is named, or else that of a call; the error where there is none."""
    name = named if named is not None else framework_in(call)
    if name is None:
        raise TypeError(
            f"{where} finds no tensor, array or module that says which framework this is for. "
            f"{write}"
        )
    backends.get(name)
    return name


def framework_in(call: object) -> str | None:
    """The backend of the first leaf that belongs to one; None if no leaf does."""
    torch, nnx = sys.modules.get("torch"), sys.modules.get("flax.nnx")
    for leaf in _leaves(call):
        leaf = getattr(leaf, "__self__", leaf)
        if torch is not None and isinstance(leaf, torch.Tensor | torch.nn.Module):
            return "torch"
        if nnx is not None and isinstance(leaf, nnx.Module):
            return "jax"
        made_by = type(leaf).__module__.partition(".")[0]
        if made_by in ("jax", "jaxlib") or hasattr(leaf, "polymp"):
            return "jax"  # an array, what jit returns, what polymp.jax.autocast returns
    return None


def _leaves(tree: object) -> Iterator[object]:
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        yield tree
        return
    inner: Iterable[object] = tree
    for leaf in inner:
        yield from _leaves(leaf)


def register_op(
    name: str, rule: str, torch: Any = None, jax: Any = None, *, kind: str = CUSTOM
) -> Any:
    """Register an op of one's own, so that policies decide for it and regions cast its inputs.

        register_op("my_norm", "fp32", torch="mylib::my_norm", jax=my_norm)

    In an enabled region its inputs are cast as the rule says, and the ops inside it run in these
    dtypes; backward runs in the dtypes of forward. A policy may give it another rule. Register it
    before torch.compile or jax.jit compiles code that calls it. It cannot be unregistered.

    Args:
        name: for policies; not one that the vocabulary has. The same name may be registered once
            for torch and once for jax, with the same rule.
        rule: of policies that have no row for it: lower, fp32, fp32_keep, widest, first, keep,
            forbid or parts.
        torch: an op of `torch.library`: "mylib::my_op", a list of such names, or what
            `torch.library.custom_op` returned.
        jax: a primitive, or a function: plain, jitted, `jax.custom_jvp` or `jax.custom_vjp`.
        kind: its class, for rows of "class:KIND".

    Returns:
        What was given, `torch` before `jax`.

    Raises:
        PolicyError: the name or a spelling is taken, the rule or class unknown, torch has no such
            op, or it writes into its arguments or has an autocast kernel already.
        TypeError: an argument of another type, or neither torch nor jax given.
        BackendMissingError: the framework of a spelling is not installed.
    """
    where = f"register_op({name!r})"
    if not isinstance(name, str) or not name.isidentifier():
        raise TypeError(f"{where}: the name must be an identifier, such as 'my_op'")
    known = member(Rule, rule, "rule", where, f"for op {name!r}")
    if known is Rule.FP8:
        raise PolicyError(
            f"{where}: rule fp8 is for matrix products of torch and JAX, not for op {name!r}. "
            "Write lower."
        )
    if kind != CUSTOM:
        vocabulary().check(f"class:{kind}", where)
    if torch is None and jax is None:
        raise TypeError(f"{where}: no op was given. Write torch=..., jax=..., or both.")
    op = Op(name, kind, rule=known)
    if torch is not None:
        from polymp.backends.torch.autocast import custom_ops

        op = replace(op, aten=custom_ops.spelled(torch, where))
    if jax is not None:
        from polymp.backends.jax.autocast.known_functions import FUNCTIONS, spelled

        primitives, functions = spelled(jax, where)
        op = replace(op, jax=primitives, functions=functions)
    vocabulary().register(op)
    if torch is not None:
        custom_ops.install(op.aten)
    if op.functions:
        FUNCTIONS.add(jax, name)
    return jax if torch is None else torch
