"""The memory that a tensor is on, by a number that its views share."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number for the memory of a tensor, the same for all views of it; 0 without memory.

    Unique among the storages that are alive, or kept by `storage_reference`. `_cdata` since
    torch 2.0.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors, and those that wrap others
        return 0


def storage_reference(tensor: torch.Tensor) -> Any:
    """Return an object that keeps a storage's key from being used again, but frees its memory.

    `StorageWeakRef` since torch 1.0.
    """
    return StorageWeakRef(tensor.untyped_storage())


class KeptKeys:
    """Storages whose keys are not used again while this object is there; their memory is freed.

    It holds a number for each: `StorageWeakRef`, which does the same for one storage, is two
    objects that Python's garbage collector goes through again and again. `_weak_ref` and
    `_free_weak_ref`, by which torch writes that class, since torch 1.0.
    """

    def __init__(self) -> None:
        self._references: list[Any] = []  # numbers
        self._free: Any = torch.UntypedStorage._free_weak_ref  # torch may be gone when Python ends

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the key of a tensor's storage."""
        self._references.append(tensor.untyped_storage()._weak_ref())

    def __del__(self) -> None:
        for reference in self._references:
            self._free(reference)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the numbers in a tensor; of a sparse one, of those that it stores.

    `_values` since torch 0.4.
    """
    if tensor.layout is torch.sparse_coo:
        return tensor._values().nbytes
    return tensor.values().nbytes if tensor.layout in _COMPRESSED else tensor.nbytes
