"""The places in which a program reads the dtype of a tensor: what depends on it cannot be seen.

`freeze` runs the examples under `DtypeReads` once; the tensors that are read stay as they are.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from polymp import code_origin
from polymp.backends.torch.compat import storage
from polymp.backends.torch.weights.freeze_usage import Group, module_path

# Attributes and functions that read the dtype of a tensor, or its values where no op is seen.
_ASKS = {
    *(getattr(torch.Tensor, name).__get__ for name in ("dtype", "itemsize", "nbytes")),
    *(
        getattr(torch.Tensor, name)
        for name in "element_size type type_as numpy tolist __array__ __dlpack__ data_ptr storage "
        "untyped_storage float double __deepcopy__ __reduce_ex__".split()
    ),
    torch.result_type,
}

# Functions in which the dtype changes nothing in a region: they raise errors outside of regions.
_HARMLESS = {nn.RNNBase.check_input.__code__}


class DtypeReads(TorchFunctionMode):
    """Notes tensors whose dtype the program reads: what depends on it cannot be seen."""

    def __init__(self, groups: Iterable[Group], paths: Mapping[int, str]) -> None:
        super().__init__()
        self.groups: dict[int, Group] = {
            storage.storage_key(t): g for g in groups for t in g.each()
        }
        self.paths = paths

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked: Sequence[Any] = ()
        if func in _ASKS:
            asked = args
        elif func is torch.Tensor.to:
            told = (*args[1:], *kwargs.values())
            asked = args if torch.float32 in told else told
        tensors = [t for t in asked if isinstance(t, torch.Tensor)]
        if tensors and not _harmless(sys._getframe(1)):
            for group in filter(None, (self.groups.get(storage.storage_key(t)) for t in tensors)):
                path = module_path(self.paths)
                group.stays(f"its dtype is read in {path}" if path else "its dtype is read")
        return func(*args, **kwargs)


def _harmless(frame: FrameType) -> bool:
    return code_origin.is_ours(frame.f_code.co_filename) or frame.f_code in _HARMLESS
