"""Call sites: the module whose call runs, and the line of the user's code.

Both are read from the Python stack, so that no hook is set and no module changed.
"""

import os
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.nn as nn

from polymp import code_origin
from polymp.backends.torch.compat import nn_modules
from polymp.backends.torch.scaler import (
    fused_step,
    grad_scaler,
    properties,
    scale_update,
    unscale,
)


class CallSite(NamedTuple):
    """The place where an op was called.

    Attributes:
        module: path of the innermost module whose call runs; "" outside of all.
        source: "file.py:12", of the innermost code outside of libraries; "" in backward code of
            torch's own.
        recomputed: True inside the recomputation of a checkpoint.
        updating: True inside an optimizer's step or a loss scaler.
    """

    module: str
    source: str
    recomputed: bool
    updating: bool = False


class CallSites:
    """Finds call sites, and remembers the paths of modules.

    Args:
        model: its modules are called by their paths in it; None to call each by its path in the
            outermost module that ran when it was met first.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._paths: dict[int, str] = {}
        self._roots: list[nn.Module] = []  # kept alive, for paths go by identity
        if model is not None:
            self._learn(model)
        self._settled = model is not None

    def _learn(self, root: nn.Module) -> None:
        self._roots.append(root)
        for name, module in root.named_modules():
            self._paths.setdefault(id(module), name)

    def here(self, frame: FrameType | None) -> CallSite:
        """Return the call site of a frame, from it and the frames that called it."""
        path: str | None = None
        module: nn.Module | None = None
        source, recomputed, updating, start = "", False, False, frame
        while frame is not None:
            code = frame.f_code
            if code is nn_modules.MODULE_CALL:
                if path is None:
                    module = frame.f_locals["self"]  # makes a dict: costly
                    path = self._paths.get(id(module))
            elif (kind := _kind(code.co_filename)) != "library":
                if kind == "user":
                    source = source or f"{_name(code.co_filename)}:{frame.f_lineno}"
                elif kind == "checkpoint":
                    recomputed |= code.co_name in _RECOMPUTES
                elif kind == "update":
                    updating |= not source  # with a source, it calls a closure of the user's
                elif kind == "engine":
                    break  # ops of a backward pass are not at the line that called backward()
            frame = frame.f_back
        if path is None and module is not None and not self._settled:
            self._learn(module)  # the outermost one that runs
            return self.here(start)
        return CallSite(path or "", source, recomputed, updating)


def exchange(frame: FrameType | None) -> str:
    """Return what FSDP2 sends while a frame runs: "all_gather", "reduce_scatter", or "".

    Casts that FSDP makes to send parameters and gradients run in its own functions, from hooks.
    """
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if kind == "fsdp" and frame.f_code.co_name in _SENDS:
            return _SENDS[frame.f_code.co_name]
        if kind not in ("library", "fsdp"):
            break
        frame = frame.f_back
    return ""


# The functions of FSDP2 that gather parameters, and the one that adds up gradients.
_SENDS = {
    "unshard": "all_gather",
    "wait_for_unshard": "all_gather",
    "foreach_reduce": "reduce_scatter",
}

# The functions of torch.utils.checkpoint that run a forward again.
_RECOMPUTES = frozenset({"recompute_fn", "unpack_hook", "backward"})

_TORCH = str(Path(torch.__file__).parent) + os.sep


@cache
def _name(filename: str) -> str:
    return Path(filename).name


@cache
def _kind(filename: str) -> str:
    """Return the kind of a file: "user", "engine", "checkpoint", "update", "fsdp", "library"."""
    if filename.startswith(_TORCH):
        end = filename.removeprefix(_TORCH)
        if end.startswith(_OPTIM):
            return "update"
        if end.startswith(_FSDP):
            return "fsdp"
        return _TORCH_S.get(end, "library")
    if filename in _SCALING:
        return "update"
    return "library" if code_origin.is_library(filename) else "user"


_TORCH_S = {
    str(Path("autograd", "graph.py")): "engine",
    str(Path("utils", "checkpoint.py")): "checkpoint",
    str(Path("amp", "grad_scaler.py")): "update",
}
_OPTIM = "optim" + os.sep
_FSDP = str(Path("distributed", "fsdp", "_fully_shard")) + os.sep
_SCALING = frozenset(
    module.__file__ for module in (fused_step, grad_scaler, properties, scale_update, unscale)
)
