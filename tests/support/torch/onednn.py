"""Kernels that oneDNN has for some processors only."""

from functools import cache

import pytest
import torch
from torch import nn


@cache
def has_lstm(dtype: torch.dtype) -> bool:
    """Return whether an LSTM runs in a dtype on this CPU, in a region of torch's own autocast."""
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype):
            nn.LSTM(4, 4)(torch.ones(2, 1, 4))
    except RuntimeError as error:
        if "LSTM forward propagation primitive" not in str(error):
            raise
        return False
    return True


def need_lstm(dtype: torch.dtype) -> None:
    """Skip a test of an LSTM in a dtype in which torch.autocast cannot run one either."""
    if not has_lstm(dtype):
        pytest.skip(f"oneDNN has no LSTM in {dtype} for this processor: torch.autocast raises, too")
