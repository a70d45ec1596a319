"""Functions in which torch.compile breaks a graph, or that it could break one in, each of one kind.

Each takes two layers and the result of the first, and returns a result of the second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from polymp.torch import autocast
from tests.support.torch.compiled import Net

MASK = torch.tensor([True, False, True])
Kind = Callable[[Net, torch.Tensor], torch.Tensor]
KINDS: dict[str, Kind] = {
    # Shapes that depend on numbers.
    "rows_of_a_mask": lambda net, y: net.second(y[MASK]),
    "rows_not_zero": lambda net, y: net.second(y[MASK.nonzero().squeeze(1)]),
    "a_slice_of_data": lambda net, y: net.second(y[: int(MASK.sum())]),
    "unique_numbers": lambda net, y: net.second(y) + torch.unique(y.detach()).sum(),
    # Numbers that are read, and branches on them.
    "a_number_read": lambda net, y: net.second(y * (1 + 0 * y.sum().item())),
    "a_branch_on_data": lambda net, y: net.second(y) if y.sum() > -1e9 else y,
    "a_conditional": lambda net, y: torch.cond(
        torch.tensor(True), lambda t: net.second(t), lambda t: t + t, (y,)
    ),
    # What Python does outside of tensors.
    "numpy_and_back": lambda net, y: (
        net.second(y) + torch.from_numpy(y.detach().float().numpy() * 2)
    ),
    # Tensors of other kinds.
    "complex_numbers": lambda net, y: (
        net.second(y) + torch.view_as_complex(y.float().view(3, 4, 2)).abs().sum()
    ),
    "a_buffer_grown": lambda net, y: net.second(y) + torch.empty(0).resize_(3, 8).zero_(),
}
graph_break = torch._dynamo.graph_break


def rows_by_mask(net: Net, y: torch.Tensor) -> torch.Tensor:
    rows = torch.zeros(3, 8)
    rows[MASK] = y[:2].float()
    return net.second(rows)


def a_loop_on_data(net: Net, y: torch.Tensor) -> torch.Tensor:
    turns = 0
    while y.abs().sum() > 0 and turns < 2:
        y, turns = net.second(y), turns + 1
    return y


def a_generator(net: Net, y: torch.Tensor) -> torch.Tensor:
    def rows() -> Iterator[torch.Tensor]:
        for at in range(3):
            graph_break()
            yield net.second(y[at : at + 1])

    return torch.cat(list(rows()))


def a_closure_that_writes(net: Net, y: torch.Tensor) -> torch.Tensor:
    def step() -> None:
        nonlocal y
        graph_break()
        y = net.second(y)

    step()
    return y


def an_error_caught(net: Net, y: torch.Tensor) -> torch.Tensor:
    try:
        graph_break()
        y = net.second(y)
        raise KeyError
    except KeyError:
        y = net.first(y)
    finally:
        y = net.second(y)
    return y


@contextlib.contextmanager
def block() -> Iterator[None]:
    yield


def a_context(net: Net, y: torch.Tensor) -> torch.Tensor:
    with block():
        graph_break()
        y = net.second(y)
    return net.first(y)


def a_compiled_function_inside(net: Net, y: torch.Tensor) -> torch.Tensor:
    graph_break()
    return torch.compile(net.second, backend="aot_eager")(y)


def inference(net: Net, y: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        z = net.second(y)
    return net.second(y) + z.clone()


def a_hook_of_a_tensor(net: Net, y: torch.Tensor) -> torch.Tensor:
    y = y * 1
    y.register_hook(lambda g: g * (2 + 0 * g.sum().item()))
    return net.second(y)


def a_gradient_inside(net: Net, y: torch.Tensor) -> torch.Tensor:
    leaf = y.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(net.second(leaf).float().sum(), leaf)
    return net.second(y) + gradient


def a_checkpoint(net: Net, y: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        graph_break()
        return net.second(torch.relu(y))

    return checkpoint(inner, y, use_reentrant=False)


class Unchanged(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def a_mode(net: Net, y: torch.Tensor) -> torch.Tensor:
    with Unchanged():
        return net.second(y)


def a_parameter_written(net: Net, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        net.second.bias.add_(0)
    return net.second(y)


def a_disabled_region_with_a_mask(net: Net, y: torch.Tensor) -> torch.Tensor:
    with autocast("cpu", enabled=False):
        return rows_by_mask(net, y)


def the_dtype_of_the_region(net: Net, y: torch.Tensor) -> torch.Tensor:
    graph_break()
    return net.second(y).to(torch.get_autocast_dtype("cpu"))


FUNCTIONS: tuple[Kind, ...] = (
    rows_by_mask, a_loop_on_data, a_generator, a_closure_that_writes, an_error_caught, a_context,
    a_compiled_function_inside, inference, a_hook_of_a_tensor, a_gradient_inside, a_checkpoint,
    a_mode, a_parameter_written, a_disabled_region_with_a_mask, the_dtype_of_the_region,
)  # fmt: skip
KINDS |= {function.__name__: function for function in FUNCTIONS}
