"""The kept casts of parameters: whose they are, and when they are dropped.

torch's compiled kernels keep a cast of every float32 parameter until the outermost region ends, in
one map for the whole process, keyed by the parameter alone. That is sound for one thread, one low
format and constant weights. This module makes it sound for all:

    another low format on the device   drop                       `keep`
    a parameter is written in place    drop                       kernels on the writing ops
    an optimizer steps                 drop                       torch's optimizer hook
    a second thread enters a region    it keeps no casts          `keep`, `end`

Our own kernels keep theirs in `cast`, per thread and keyed by format, version and epoch.
Not seen: `p.data.copy_()`, `p.data = t`, and writes inside a disabled subregion.
"""

import threading
import weakref
from threading import get_ident
from typing import Any

import torch
from torch import clear_autocast_cache
from torch.optim.optimizer import register_optimizer_step_post_hook

from polymp.backends.torch import compat, native

# In-place ops with which parameters are written by hand: updates, copies, initialisation, clipping.
# Activations (relu_, dropout_, ...) are not among them; they keep their compiled fallthrough.
WRITERS = (
    "add_ sub_ mul_ div_ pow_ neg_ abs_ sqrt_ sign_ round_ floor_ trunc_ lerp_ addcmul_ addcdiv_ "
    "addmm_ addmv_ addr_ baddbmm_ clamp_ clamp_min_ clamp_max_ copy_ fill_ zero_ set_ "
    "normal_ uniform_ bernoulli_ exponential_ random_ masked_fill_ masked_scatter_ index_add_ "
    "index_copy_ index_fill_ index_put_ scatter_ scatter_add_ tril_ triu_ fill_diagonal_ renorm_ "
    "_foreach_add_ _foreach_sub_ _foreach_mul_ _foreach_div_ _foreach_lerp_ _foreach_addcmul_ "
    "_foreach_addcdiv_ _foreach_copy_ _foreach_zero_ _foreach_neg_ _foreach_pow_ _foreach_sqrt_ "
    "_foreach_clamp_min_ _foreach_clamp_max_ _foreach_maximum_ _foreach_minimum_"
).split()

_owner: dict[str, int] = {}  # "thread" -> ident of the thread whose casts torch's map holds
_format: dict[str, torch.dtype] = {}  # device -> format of the casts in torch's map
_epoch = [0]  # raised by every drop; casts of our own kernels from before it are stale
_library = torch.library.Library("aten", "IMPL")
_watched: set[str] = set()


def drop() -> None:
    """Forget every kept cast, of every thread."""
    _epoch[0] += 1
    clear_autocast_cache()


def drop_unknown() -> None:
    """Forget every kept cast, and that the format of those to come is known."""
    drop()
    _format.clear()


@compat.no_frame
def keep(device: str, dtype: torch.dtype, casting: bool, depth: int) -> bool:
    """May this thread keep casts in torch's map from now on, `depth` regions deep?

    True makes the map this thread's; if it will be `casting` to `dtype` on the device, casts to
    another format, or to an unknown one, are dropped. False while the map belongs to another
    living thread.
    """
    me = get_ident()
    if _owner.setdefault("thread", me) != me and not _take_over(me):
        return False
    if casting and _format.get(device) is not dtype:
        if depth > 1:  # else there is none yet
            drop()
        _format[device] = dtype
    return True


@compat.no_frame
def end() -> None:
    """This thread left its last region."""
    if _kept_any:
        _kept.casts.clear()
    if _owner.get("thread") == get_ident():
        _epoch[0] += 1
        clear_autocast_cache()
        _format.clear()
        del _owner["thread"]


def _take_over(me: int) -> bool:
    """Make the map this thread's if its owner ended without leaving its regions."""
    owner = _owner.get("thread")
    if any(t.ident == owner for t in threading.enumerate()):
        return False
    drop_unknown()
    _owner["thread"] = me
    return True


def watch(device: str) -> None:
    """Have writes to parameters noticed in regions of the device; once for each device."""
    key = compat.autocast_key(device)
    if key is None or device in _watched:
        return
    native.kernels(device)  # what is compiled must be read before ours stand beside it
    if not _watched:
        register_optimizer_step_post_hook(lambda *_: drop())
    _watched.add(device)
    for name in WRITERS:
        packet = getattr(torch.ops.aten, name)
        for variant in packet.overloads():
            op = getattr(packet, variant)
            target = op.name().removeprefix("aten::")
            compat.put(_library, target, _writer(op, compat.keyset(key)), key)


def _writer(op: torch._ops.OpOverload, excluded: torch._C.DispatchKeySet) -> Any:
    def writer(_: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        written = args[0]
        if any(map(_is_parameter, [written] if isinstance(written, torch.Tensor) else written)):
            drop()
        with compat.ExcludeKeys(excluded):
            return op(*args, **kwargs)

    return writer


def _is_parameter(t: torch.Tensor) -> bool:
    """True for a leaf that wants gradients and for a view of one: what torch keeps casts of."""
    base = t._base if t._is_view() else t
    return base is not None and base.requires_grad and base.is_leaf


class _Kept(threading.local):
    def __init__(self) -> None:
        self.casts: dict[
            tuple[int, torch.dtype], tuple[weakref.ref[Any], tuple[int, ...], torch.Tensor]
        ] = {}


_kept = _Kept()
_kept_any: set[bool] = set()  # empty as long as our kernels have kept nothing, in any thread


def cast(t: torch.Tensor, dtype: torch.dtype, low: torch.dtype) -> torch.Tensor:
    """`t` in `dtype`, for our kernels; a parameter's cast to the low format is kept.

    Args:
        t: any float tensor.
        dtype: target.
        low: the region's format.

    Returns:
        A tensor of `dtype` with the shape of `t`; `t` itself if it has that dtype.

    Source:
        When a cast may be kept: torch v2.13 aten/src/ATen/autocast_mode.cpp, `cached_cast`.
    """
    if t.dtype is dtype:
        return t
    keep = (
        dtype is low
        and t.dtype is torch.float32
        and type(t) in (torch.Tensor, torch.nn.Parameter)  # a fake tensor has no address,
        and t.layout is torch.strided  # nor has a sparse one
        and t.requires_grad
        and t.is_leaf
        and not t._is_view()
        and torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()
    )
    if not keep:
        return t.to(dtype)
    stamp = (_epoch[0], t._version, t.data_ptr())
    key = (id(t), dtype)
    found = _kept.casts.get(key)
    if found is not None and found[0]() is t and found[1] == stamp:
        return found[2]
    with torch.enable_grad():  # else a cast made under no_grad would cut later gradients off
        made = t.to(dtype)
    _kept.casts[key] = (weakref.ref(t), stamp, made)
    _kept_any.add(True)
    return made
