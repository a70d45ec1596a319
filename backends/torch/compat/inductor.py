"""Inductor: a pass over its graphs, for `torch.compile(..., options=...)`; the graphs that run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files


class ScalarsFirst(CustomGraphPass):
    """Computes numbers that an array on a CPU needs once, and not again for each of its vectors.

    Inductor writes the arithmetic of 0-dim tensors into the loops over arrays that use them, and
    gcc cannot move it out. In a step of Adam that is `beta ** step`, two calls of `pow` for eight
    elements, which take two thirds of the time. Before `as_strided` inductor computes a tensor.
    """

    def __call__(self, graph: Any) -> None:
        """Change a graph."""
        for node in list(graph.nodes):
            if node.op != "call_function" or not node.all_input_nodes or not _is_number(node):
                continue
            arrays = [user for user in node.users if not _is_number(user)]
            if arrays:
                with graph.inserting_after(node):
                    held = graph.call_function(torch.ops.aten.as_strided.default, (node, [], []))
                held.meta.update(node.meta)
                for user in arrays:
                    user.replace_input_with(node, held)

    def uuid(self) -> Any:
        """Return what tells this pass from others, for inductor's cache."""
        return get_hash_for_files((__file__,))


def _is_number(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.device.type == "cpu"


OPTIONS: dict[str, Any] = {"post_grad_custom_post_pass": ScalarsFirst()}


@contextmanager
def graphs_watched(tell: Callable[[Sequence[Any]], Callable[[Any], None]]) -> Iterator[None]:
    """Call a function with the inputs of each compiled graph, then with the results."""
    # It is called before the graph runs, which may write to its inputs and empty their list; what
    # it returns is called after it. A graph's own results come first; then, of a forward pass, what
    # its backward pass needs. No mode and no hook sees any of them.
    from torch._inductor.output_code import CompiledFxGraph

    graphs: Any = CompiledFxGraph
    run = graphs.__call__

    def watched(graph: Any, inputs: Sequence[Any]) -> Any:
        ran = tell(inputs)
        results = run(graph, inputs)
        ran(results)
        return results

    graphs.__call__ = watched
    try:
        yield
    finally:
        graphs.__call__ = run
