"""Values of a trace that a function stored outside of itself, where they are dead once it ends.

What is older than the trace and refers to one of its values was given it by the function: a list of
the user's, an object, the parameters that a library collects. What a function made in the trace has
captured does not count: a cache may keep that function, but does not read what it captured.
"""

import functools
import gc
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from types import CellType, FrameType, FunctionType, GeneratorType, MethodType

import jax

from polymp.backends.jax import compat

_CACHE = type(functools.lru_cache(len))

# They run, or are called: what they refer to, they do not hand out.
_CODE = (FrameType, FunctionType, GeneratorType, MethodType, functools.partial, _CACHE)

# Carriers whose holders are looked for: all, but for the largest leaks.
_SOUGHT = 256


def escaped(trace: weakref.ref[jax.core.Trace]) -> list[str]:
    """Find values of an ended trace in older objects.

    To be called where Python's collector has been off since before the trace, and nothing was young
    then: what is young now was made by the trace. Nothing outlives most traces, and then there is
    nothing to look for.
    """
    if trace() is None:
        return []
    young = gc.get_objects(generation=0)
    tracers = compat.tracers_of(trace(), young)
    if not tracers:  # the jaxpr holds the trace, where a custom_vjp function is in it
        return []
    outside = _held_outside(young, tracers)
    # By identity of what is held, the data that holds it.
    holders: defaultdict[int, list[object]] = defaultdict(list)
    known = {id(x) for x in young}
    operands = {id(compat.operands_of(tracer)) for tracer in tracers}
    for x in young:
        if not isinstance(x, (*_CODE, CellType)) and id(x) not in operands:
            for held in gc.get_referents(x):
                if id(held) in known:
                    holders[id(held)].append(x)
    carried: dict[int, set[int]] = {}  # by identity of a carrier, the numbers of its tracers
    carriers: list[object] = []
    for number, tracer in enumerate(tracers):
        left: list[object] = [tracer]
        while left:
            x = left.pop()
            if x is young or number in carried.setdefault(id(x), set()):
                continue
            if not carried[id(x)]:
                carriers.append(x)
            carried[id(x)].add(number)
            left += holders[id(x)]
    sought = tuple([x for x in carriers if id(x) in outside][:_SOUGHT])  # a referrer from 3.13 on
    if not sought:
        return []
    # Among frozen objects gc finds no referrers. They are not frozen again after: gc.freeze would
    # take all that there is now, and what of it ends up in cycles would never be freed.
    gc.unfreeze()
    ours = known | {id(x) for x in (young, tracers, carriers, sought, *holders.values())}
    older = [
        x
        for x in gc.get_referrers(*sought)
        if id(x) not in ours and not isinstance(x, _CODE)
        if not type(x).__module__.startswith("jaxlib")  # the caches of jax are there
    ]
    caches = [x for x in gc.get_referrers(*older) if isinstance(x, _CACHE)]
    kept = {id(x) for cache in caches for x in gc.get_referents(cache)}
    found: set[int] = set()
    for holder in older:
        if id(holder) not in kept:
            found.update(*(carried.get(id(x), ()) for x in gc.get_referents(holder)))
    return [compat.where_made(tracers[number]) for number in sorted(found)]


def _held_outside(young: Sequence[object], tracers: Sequence[object]) -> set[int]:
    """Find the young objects that something else than young objects and these lists refers to.

    Counts of references tell, and cost less than a look at every older object: there are none,
    where what the function made in the trace has captured its values, and a cache keeps that.
    """
    # The last object has only the references that counting itself takes.
    *counts, counting = [sys.getrefcount(x) for x in (*young, object())]
    known = Counter(id(x) for x in (*young, *tracers))
    for x in young:
        if x is not young:
            known.update(map(id, gc.get_referents(x)))
    pairs = zip(young, counts, strict=True)
    return {id(x) for x, count in pairs if count - counting != known[id(x)]}
