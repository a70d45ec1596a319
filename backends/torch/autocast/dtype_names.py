"""The dtypes of this torch by their names, and their names."""

import torch

# Aliases left out: "float16", not "half".
NAMES: dict[torch.dtype, str] = {
    d: str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in NAMES.items()}
