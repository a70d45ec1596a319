"""The memory that a tensor is on, by a number that its views share."""

from typing import Any

import torch


def storage_key(tensor: torch.Tensor) -> int:
    """A number for the memory that a tensor is on, the same for all views of it; 0 without one.

    Unique among the storages that are alive, or held by `storage_reference`. `_cdata` since
    torch 2.0.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors, and those that wrap others
        return 0


def storage_reference(tensor: torch.Tensor) -> Any:
    """What keeps the key of a storage from being given to another, and its memory from nothing.

    `StorageWeakRef` since torch 1.0.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())
