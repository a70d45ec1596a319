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
    """Return the dtype that a user has named.

    Args:
        value: a name or an alias, or a dtype; see `polymp.dtypes.name`.
        what: the argument, for messages, such as "explain(): dtype".
        accepted: full names of the dtypes that are accepted.

    Returns:
        The dtype of torch.

    Raises:
        TypeError: `value` is neither a string nor a dtype.
        ValueError: it is no accepted dtype.
    """
    return DTYPES[dtypes.name(value, accepted, what)]
