"""`hold_casts`: a block in which a model's weights are cast once, not once in every region."""

import contextlib
import sys
import threading
from contextlib import ContextDecorator
from typing import Any, Literal, Self

import torch
import torch.nn as nn

from polymp.backends.torch.autocast import held_casts, lent_kernels, region_casts
from polymp.backends.torch.compat import dynamo
from polymp.backends.torch.weights import held_modules


class hold_casts(ContextDecorator):  # a context manager, named as torch's are
    """Keep the casts of models' weights until a weight changes or the block ends.

        with hold_casts(model):
            for x, y in microbatches:
                with autocast("cpu"):
                    loss = loss_fn(model(x), y)      # weights are cast in the first one only
                loss.backward()
            optimizer.step()                         # they changed: they will be cast again

    A region of torch.autocast drops its casts when it ends, and never keeps casts of frozen weights
    or in inference mode. In this block casts stay: of parameters with and without gradients, of
    buffers, and of views of them, in every low dtype, for every thread. Outputs and gradients are
    the same as without the block, bit for bit. It pays on CPUs where regions are entered again with
    the same weights and few rows, as in decoding and sampling: a cast then takes longer than the
    product. With many rows, as in most training steps, casts are a small part of the time.

    A cast is made again when its weight has another version, address, shape or strides than before
    (after in-place writes, `load_state_dict`, `weight.data = ...`, `swap_tensors`), and after the
    step of any `torch.optim.Optimizer` that has the weight, fused or not. After a write that none
    of this shows, such as `weight.data.copy_(...)`, call `invalidate()`; `check=True` finds such
    writes. Compiled code reads casts as they are when a region is entered: a write inside the
    region, by the compiled code itself or by an op that does not usually update weights, reaches it
    in the next region only.

    These are cast at every use as without the block: parameters assigned to a module after the
    block was entered, until `invalidate()` or `load_state_dict`; parameters that FSDP1 or FSDP2
    gathers and buffers that DDP sends, because these writes cannot be noticed; DTensors and other
    tensor subclasses; tensors made in inference mode; weights of recurrent layers on CUDA, which
    are cast into one buffer; ops that CUDA graphs, torch.export and torch.func record; compiled
    code, but for weights of linear layers and convolutions without gradients, in a region without a
    policy that is entered outside of it; with gradients, parameters below 65,536 elements, whose
    cast costs less than holding it, and in regions of torch.autocast those whose casts torch keeps
    itself.

    Enter a block outside of regions, or before a region uses a weight. Later the gradients are
    still right, but added up in another order.

    Blocks nest, and one object can be entered again, by several threads too; the casts of a model
    are held while any block for it is open. The block is a decorator, too.

    Args:
        models: the modules whose parameters and buffers are held; one or more.
        check: compare every held cast with the weight at each use, which costs more than casting.

    Raises:
        TypeError: no model is given, or an argument is no module.
        StaleCastError: in the block, with `check`: a cast is stale. The message names the weight.
    """

    def __init__(self, *models: nn.Module, check: bool = False) -> None:
        for model in models:
            if isinstance(model, torch.jit.ScriptModule):
                raise TypeError(
                    f"hold_casts() cannot hold the casts of {type(model).__name__}: the code of "
                    "torch.jit has its casts in it. Give it the module that was scripted."
                )
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"hold_casts() takes modules, got {type(model).__name__}: {model!r:.80}. "
                    "Write: with hold_casts(model): ..."
                )
        if not models:
            raise TypeError("hold_casts() needs a model. Write: with hold_casts(model): ...")
        if not isinstance(check, bool):
            raise TypeError(f"hold_casts(check=...) must be True or False, got {check!r}.")
        self.models: tuple[nn.Module, ...] = models
        self.check = check
        self._lock = threading.RLock()
        self._entered = 0
        self._held: list[held_casts.Weight] = []
        self._layers: list[nn.Module] = []
        self._lent: object = None  # to whom kernels are lent
        self._hooks: list[Any] = []
        self._counted = [0, 0]  # casts made and served, without those that the weights count now

    @dynamo.untraced("a hold_casts block is entered and left outside of compiled code")
    def __enter__(self) -> Self:
        with self._lock:
            if not self._entered:
                try:
                    for model in self.models:
                        hook = model.register_load_state_dict_post_hook(_Loaded(self))
                        self._hooks.append(hook)
                    self._take()
                except BaseException:
                    self._unhook()
                    raise
            self._entered += 1
        return self

    @dynamo.untraced("a hold_casts block is entered and left outside of compiled code")
    def __exit__(self, *exc: object) -> Literal[False]:
        with self._lock:
            if not self._entered:
                raise RuntimeError(f"{self!r}: it was left without having been entered.")
            self._entered -= 1
            if not self._entered:
                self._unhook()
                self._let_go()
        return False

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def invalidate(self) -> None:
        """Drop the casts of these models' weights, after a write that cannot be noticed.

        Casts of parameters that were assigned since the block was entered are held from now on.
        """
        with self._lock:
            if self._entered:
                before, layers, lent = self._held, self._layers, self._lent
                held_casts.drop(weight.tensor for weight in before)
                region_casts.drop()  # of the regions that are open
                self._count(before, 1)
                self._take()
                held_casts.release(before, self.check)
                held_modules.let_go(layers)
                lent_kernels.take_back(lent)

    def _take(self) -> None:
        named: dict[int, tuple[str, torch.Tensor]] = {}
        for model in self.models:
            unseen = _written_unseen(model)
            for tensors in (model.named_parameters(), model.named_buffers()):
                for name, tensor in tensors:
                    if tensor.is_floating_point() and id(tensor) not in unseen:
                        named.setdefault(id(tensor), (name, tensor))
        self._lent = None
        for device in {tensor.device.type for _, tensor in named.values()}:
            region_casts.watch(device)
        self._held = held_casts.hold(named.values(), self.check)
        self._layers = held_modules.take(self.models)
        self._count(self._held, -1)
        if held_modules.bare(self.models, self._held):
            self._lend()
        elif self._lend_if_trained not in held_casts.held.deferred:
            held_casts.held.deferred.append(self._lend_if_trained)

    def _lend(self) -> None:
        """Put kernels of ours on the ops, for casts that no layer hands over."""
        devices = frozenset(weight.tensor.device.type for weight in self._held)
        self._lent = object()
        lent_kernels.lend(devices, self._lent)

    def _lend_if_trained(self) -> None:
        """Do so if a cast that is held is differentiated: each region needs a node of its own."""
        small = held_casts.SMALL
        with self._lock:
            trained = (w.tensor.requires_grad and w.tensor.numel() >= small for w in self._held)
            if self._entered and not self._lent and any(trained):
                self._lend()
                self._forget_deferred()

    def _forget_deferred(self) -> None:
        with contextlib.suppress(ValueError):
            held_casts.held.deferred.remove(self._lend_if_trained)

    def _let_go(self) -> None:
        self._forget_deferred()
        self._count(self._held, 1)
        held_casts.release(self._held, self.check)
        held_modules.let_go(self._layers)
        lent_kernels.take_back(self._lent)
        self._held, self._layers, self._lent = [], [], None

    @property
    def bytes(self) -> int:
        """The bytes of the casts that are held now."""
        return held_casts.bytes_of(self._held)

    @property
    def made(self) -> int:
        """The number of casts of these weights that were made while this block was open."""
        return self._counted[0] + sum(weight.made for weight in self._held)

    @property
    def saved(self) -> int:
        """The number of casts that were not made while it was open, because one was held."""
        served = self._counted[1] + sum(weight.served for weight in self._held)
        return served - self.made

    def _count(self, weights: list[held_casts.Weight], sign: int) -> None:
        """Add the counts of weights to those of this block, or subtract them."""
        self._counted[0] += sign * sum(weight.made for weight in weights)
        self._counted[1] += sign * sum(weight.served for weight in weights)

    def __repr__(self) -> str:
        models = ", ".join(type(model).__name__ for model in self.models)
        state = "" if self._entered else ", not open"
        return f"hold_casts({models}): {self.made} casts made, {self.saved} saved{state}"


class _Loaded:
    """The hook of a model that has loaded a state; in a copy of the model it does nothing."""

    def __init__(self, block: hold_casts | None = None) -> None:
        self.block = block

    def __call__(self, *_: object) -> None:
        if self.block is not None:
            self.block.invalidate()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


def _written_unseen(model: nn.Module) -> set[int]:
    """Return the identities of tensors that torch.distributed writes without a new version.

    These are parameters that FSDP gathers, and buffers that DDP sends to the other ranks.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    gathers = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp else ()
    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, gathers):
            found.update(map(id, module.parameters()))
        if isinstance(module, nn.parallel.DistributedDataParallel) and module.broadcast_buffers:
            found.update(map(id, module.buffers()))
    return found
