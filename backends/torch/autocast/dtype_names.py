"""The dtypes of this torch by their names, and their names."""

from collections.abc import Iterable

import torch

from polymp import dtypes
from polymp.backends.torch.compat import dynamo

# Without aliases: "float16", not "half".
NAMES: dict[torch.dtype, str] = {
    d: str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in NAMES.items()}


@dynamo.at_trace_time
def of(value: object, what: str, accepted: Iterable[str] = dtypes.FORMATS) -> torch.dtype:
    """Return the dtype that a user has named."""
    return DTYPES[dtypes.name(value, accepted, what)]
