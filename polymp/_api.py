"""`polymp.explain`: the report of a call, from the backend that the call is in.

Which that is follows from what is called and with what; nothing is imported that is not there
already.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from polymp import backends
from polymp.diagnostics.report import Report


def explain(fn: Any = None, *args: Any, **kwargs: Any) -> Report:
    """What runs in which format, and why: a report with a row for each op call site.

        report = polymp.explain(model, x, dtype="bfloat16")
        print(report)

    A torch module, or a call with torch tensors or modules, is explained by `polymp.torch.explain`,
    everything else by `polymp.jax.explain`; they say which arguments there are. For a function that
    takes no tensor, call one of these.

    Args:
        fn: a module or a function.
        args: of the call.
        kwargs: of the call, and of the backend's `explain`: `dtype`, `policy`, in torch `device`.

    Returns:
        The report.

    Raises:
        TypeError: `fn` is not callable, or nothing says which framework it is for.
    """
    if fn is None:
        raise TypeError(
            "polymp.explain(fn, *args) explains a call. For a block of torch code, write "
            "`with polymp.torch.explain() as report:`."
        )
    name = _framework((fn, args, kwargs))
    if name is None:
        called = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"polymp.explain({called}, ...) finds no tensor, array or module that says which "
            "framework this is for. Call polymp.torch.explain or polymp.jax.explain."
        )
    backends.get(name)
    if name == "torch":
        from polymp.backends.torch.diagnostics.explain import explain as in_torch

        found: Report = in_torch(fn, *args, **kwargs)
        return found
    from polymp.backends.jax.diagnostics.explain import explain as in_jax

    return in_jax(fn, *args, **kwargs)


def _framework(call: Any) -> str | None:
    """The name of the backend that the first leaf belongs to that belongs to one; None if none."""
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


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        yield tree
        return
    inner: Iterable[Any] = tree
    for leaf in inner:
        yield from _leaves(leaf)
