"""`layer_norm` of a low input on CPUs: computed in float32, with the low input saved for backward.

torch's backward kernel there adds up the gradients of the weights in the dtype of the input: with
65,536 rows in bfloat16 nothing of such a sum is right. A cast before would save a float32 input; so
it is done where no kernel can have a backward pass of its own: under transforms of torch.func.
Source: torch v2.13 aten/src/ATen/native/cpu/layer_norm_kernel.cpp, whose buffers have X's dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from polymp.backends.torch.compat import modes

Optional = torch.Tensor | None


def kernel(name: str, device: str) -> Callable[..., torch.Tensor] | None:
    """Return the kernel of an op's overload on a device, for low inputs, if it has one here."""
    return _layer_norm if (name, device) == ("layer_norm", "cpu") else None


def _layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: Optional = None,
    bias: Optional = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    if modes.is_transformed():
        wide = x.float(), normalized_shape, _wide(weight), _wide(bias), eps
        return torch.layer_norm(*wide).to(x.dtype)
    found = _LayerNorm.apply(x, normalized_shape, weight, bias, eps)  # type: ignore[no-untyped-call]
    result: torch.Tensor = found[0]
    return result


def _wide(t: Optional) -> Optional:
    return None if t is None else t.float()


class _LayerNorm(torch.autograd.Function):
    """Forward and backward in float32; the result and the gradient have the input's dtype."""

    @staticmethod
    def forward(
        x: torch.Tensor, shape: Sequence[int], weight: Optional, bias: Optional, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y, mean, rstd = torch.native_layer_norm(x.float(), shape, _wide(weight), _wide(bias), eps)
        return y.to(x.dtype), mean, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        x, ctx.shape, weight, bias, _ = inputs
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(x, weight, bias, mean, rstd)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Optional, None, Optional, Optional, None]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[at] for at in (0, 2, 3)]
        found = torch.ops.aten.native_layer_norm_backward(
            grads[0].float(), x.float(), ctx.shape, mean, rstd, _wide(weight), _wide(bias), wanted
        )
        dx, dweight, dbias = (
            g.to(t.dtype) if want else None
            for g, t, want in zip(found, (x, weight, bias), wanted, strict=True)
        )
        return dx, None, dweight, dbias, None
