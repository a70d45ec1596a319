"""torch.nn: calls of modules, recurrent weights, clipping."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any, TypeVar

import torch
import torch.nn as nn

F = TypeVar("F", bound=Callable[..., Any])


def flatten_rnn_weights(weights: list[torch.Tensor], *options: Any) -> None:
    """Move the weights of a recurrent layer into one buffer, in cuDNN's order, in place.

    `torch.nn.RNNBase.flatten_parameters` calls the same function with the same options. Since torch
    1.0, with the size of projections since 1.8; only in builds with cuDNN.
    """
    torch._cudnn_rnn_flatten_weight(weights, *options)


# A module's call is its `_call_impl`, since torch 1.8.
MODULE_CALL: CodeType = nn.Module._call_impl.__code__


def running_modules() -> Iterator[nn.Module]:
    """Yield the modules whose calls run in this thread, the innermost first, from the stack."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


def before_clipping(see: Callable[[Sequence[torch.Tensor]], None]) -> None:
    """Call `see` with the parameters whose gradients torch.nn.utils is about to clip.

    Both of its public functions for norms call `_clip_grads_with_norm_`, which they look up in
    their module, so that functions that were imported before are changed, too. Since torch 2.6.
    `clip_grad_value_` is replaced in its module and in `torch.nn.utils`.
    """
    from torch.nn import utils
    from torch.nn.utils import clip_grad

    def seen(clip: F) -> F:
        @functools.wraps(clip)
        def clipping(parameters: Any, *args: object, **kwargs: object) -> Any:
            one = isinstance(parameters, torch.Tensor)
            parameters = [parameters] if one else list(parameters)  # it may be an iterator
            see(parameters)
            return clip(parameters, *args, **kwargs)

        return clipping  # type: ignore[return-value]

    clip_grad._clip_grads_with_norm_ = seen(clip_grad._clip_grads_with_norm_)
    utils.clip_grads_with_norm_ = clip_grad._clip_grads_with_norm_
    clip_grad.clip_grad_value_ = utils.clip_grad_value_ = seen(clip_grad.clip_grad_value_)
