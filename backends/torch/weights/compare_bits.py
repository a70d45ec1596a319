"""Bit-for-bit comparison of the results of two runs, in any containers and objects."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves


def same(one: object, other: object) -> bool:
    """Return whether two results are the same, tensors bit for bit, in any containers."""
    parts, others = list(leaves(one)), list(leaves(other))
    if len(parts) != len(others):
        return False
    return all(
        same_bits(a, b)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else type(a) is type(b) and (not isinstance(a, _PLAIN) or repr(a) == repr(b))
        for a, b in zip(parts, others, strict=True)
    )


_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype)


def leaves(tree: object, seen: frozenset[int] = frozenset()) -> Iterator[Any]:
    """Yield tensors and plain values in a result: in containers, and in attributes of objects."""
    for leaf in tree_leaves(tree):
        inside = None if isinstance(leaf, torch.Tensor | type | nn.Module) else _attributes(leaf)
        if inside and id(leaf) not in seen:
            yield from leaves(inside, seen | {id(leaf)})
        else:
            yield leaf


def _attributes(value: object) -> dict[Any, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    return getattr(value, "__dict__", None)


def digest(t: torch.Tensor) -> str:
    """Return a hash of the bits of a tensor; "" if it has none that can be read."""
    if not _has_bits(t):
        return ""
    return hashlib.blake2b(_bits(t).cpu().numpy().tobytes(), digest_size=16).hexdigest()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape, device and bits."""
    if a.dtype is not b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    if not (_has_bits(a) and _has_bits(b)):
        return a.layout == b.layout and torch.equal(a.to_dense(), b.to_dense())
    return torch.equal(_bits(a), _bits(b))


def _has_bits(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and not t.is_nested and not t.is_quantized


def _bits(t: torch.Tensor) -> torch.Tensor:
    flat = t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)
