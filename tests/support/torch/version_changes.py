"""The differences between the supported versions of torch: one table, which tests read.

Nothing of polymp is imported here, for a process that shows what torch does by itself.
"""

import torch

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
