"""The differences between the supported versions of torch: one table, which tests read.

Nothing of polymp is imported here, for a process that shows what torch does by itself.
"""

from functools import cache

import pytest
import torch
from torch import nn


@cache
def has_lstm(dtype: torch.dtype) -> bool:
    """Return whether an LSTM trains in a dtype on this CPU, in a region of torch's own autocast."""
    try:
        with torch.autocast("cpu", dtype):  # with gradients, which some CPUs do not have in float16
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


VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

# Overloads with an autocast kernel that take named dimensions, until torch 2.12. Policies have no
# rules for them.
NAMED = (
    "cumprod.dimname",
    "cumsum.dimname",
    "index_copy.dimname",
    "log_softmax.Dimname",
    "norm.names_ScalarOpt_dim",
    "prod.dim_Dimname",
    "softmax.Dimname",
    "sum.dim_DimnameList",
)

# Overloads of the vocabulary that some versions lack, and whether this one has them.
HERE = {
    "cholesky": VERSION < (2, 14),
    "qr": VERSION < (2, 14),
    "linalg_matrix_sqrth": VERSION >= (2, 14),
}
LACKS = frozenset(name for name, here in HERE.items() if not here)

# Ops that a build for CUDA asks for a driver, also on fake tensors.
ASK_FOR_DRIVER = (
    ("_convolution", "_convolution.deprecated")
    if torch.version.cuda is not None and VERSION < (2, 13)
    else ()
)
