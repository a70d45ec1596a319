"""The ops of torch's own database, called under every shipped policy on a CPU.

For processes of their own: what is imported here changes settings of torch's.
"""

from __future__ import annotations

import json
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

# torch's helpers of tests import it, and use it for none of what is called here.
sys.modules.setdefault("expecttest", types.ModuleType("expecttest")).TestCase = unittest.TestCase  # type: ignore[attr-defined]
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

from polymp.errors import ForbiddenOpError  # noqa: E402
from polymp.rules import policy_files  # noqa: E402
from polymp.torch import autocast  # noqa: E402

LOW = (torch.float16, torch.bfloat16)
POLICIES = policy_files.shipped()


def main(part: int, parts: int, samples: int, out: str) -> None:
    """Write the errors of one of so many parts of the database that the default region lacks."""
    warnings.simplefilter("ignore")
    ops = [op for op in op_db if torch.float32 in op.dtypes][part::parts]
    errors = [error for op in ops for error in _errors(op, samples)]
    Path(out).write_text(json.dumps([len(ops), errors]))


def _errors(op: Any, samples: int) -> Iterator[str]:
    torch.manual_seed(0)
    wants = op.supports_autograd
    inputs = op.sample_inputs("cpu", torch.float32, requires_grad=wants)
    for number, sample in enumerate(islice(inputs, samples)):  # each policy in one dtype
        for low in LOW:
            for given in (low, torch.float32):
                call = op, _cast((sample.input, *sample.args), given), _cast(sample.kwargs, given)
                if _error(*call, autocast("cpu", low)):
                    continue
                for at, policy in enumerate(POLICIES):
                    if policy == "fp8" and low is torch.float16:
                        continue
                    if policy != "fp8" and low is not LOW[(at + number) % 2]:
                        continue
                    if error := _error(*call, autocast("cpu", low, policy=policy)):
                        yield f"{op.full_name} {policy} {low} of {given}: {error}"


def _error(op: Any, args: Any, kwargs: Any, region: Any) -> str:
    try:
        with region:
            result = op(*args, **kwargs)
        wanted = [t for t in _tensors((args, kwargs)) if t.requires_grad]
        found = [t for t in _tensors(result) if t.requires_grad and t.is_floating_point()]
        if found:
            torch.autograd.grad(sum(t.float().sum() for t in found), wanted, allow_unused=True)
    except ForbiddenOpError:  # as the policy says
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32:
            return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)
        return leaf

    return tree_map(cast, value)
