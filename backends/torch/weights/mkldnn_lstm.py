"""torch's LSTM on CPUs in parts, as mkldnn runs it."""

from collections.abc import Sequence
from typing import Any

import torch


def in_use() -> bool:
    """Return whether torch uses mkldnn; torch.export turns it off while it traces."""
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def takes(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Return whether torch runs an op by mkldnn, layer by layer, which fake tensors do not show.

    Source:
        torch v2.13 aten/src/ATen/native/RNN.cpp, `use_mkldnn` and `lstm`.
    """
    if op is not torch.ops.aten.lstm.input:
        return False
    x, (h, c), params = args[:3]
    supported = {
        torch.float32: True,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported() and not torch.is_grad_enabled(),
    }
    on_cpu = all(t.device.type == "cpu" for t in (x, h, c, *params))
    return on_cpu and supported.get(x.dtype, False) and h.shape[2] == c.shape[2] and x.numel() != 0


def run(
    x: torch.Tensor,
    state: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run an LSTM as torch does by mkldnn: torch v2.13 ATen/native/mkldnn/RNN.cpp, `mkldnn_rnn`."""
    h, c = state[0].contiguous(), state[1].contiguous()
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    each = 4 if has_biases else 2
    directions = 2 if bidirectional else 1
    last_h, last_c = [], []
    for layer in range(num_layers):
        outputs = []
        for reverse in range(directions):
            at = layer * directions + reverse
            weights = params[at * each : (at + 1) * each]
            biases = weights[2:] or [torch.zeros_like(w) for w in weights]
            y, hn, cn, _ = torch.ops.aten.mkldnn_rnn_layer(
                x, *weights[:2], *biases, h[at], c[at], bool(reverse), [], 2, h.shape[2],
                num_layers, has_biases, bidirectional, batch_first, train,
            )  # fmt: skip
            outputs.append(y)
            last_h.append(hn)
            last_c.append(cn)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, train=True)
    x = x.transpose(0, 1) if batch_first else x
    return x, torch.stack(last_h), torch.stack(last_c)
