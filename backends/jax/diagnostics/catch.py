"""`catch`: stop a training at the first step whose numbers break, and name the op.

every call      the losses are checked on the device
every N calls   the findings are read, the state is checked, and the arguments are copied
at a bad value  repeat the calls from that copy with every check, stop at the first bad one, and
                let `locate` look at it
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from polymp.backends.jax.arrays import AsyncCopy, is_array, is_float, not_finite
from polymp.backends.jax.autocast.api import JITTED_FUNCTION
from polymp.backends.jax.diagnostics.audit import locate
from polymp.backends.jax.modules import nnx
from polymp.diagnostics.audit_records import Fault
from polymp.diagnostics.bad_step import (
    BadStep,
    BatchCopies,
    CaughtStep,
    Repeated,
    checked_arguments,
    described,
)

P = ParamSpec("P")
R = TypeVar("R")


def catch(
    step: Callable[P, R] = None,  # type: ignore[assignment]  # noqa: RUF013
    *,
    every: int = 100,
    on_bad: Literal["raise", "report"] = "raise",
) -> "Catch[P, R]":
    """Wrap a training step, so that a loss or a weight that is not finite stops it.

        step = polymp.jax.catch(train_step)  # jitted, and it may donate its arguments
        for batch in batches:
            params, opt_state, loss = step(params, opt_state, batch)

    Every call checks on the device, without a wait, that results with one element are finite, such
    as the loss. Every `every` calls the arguments are checked and copied. When something is not
    finite, the calls are repeated from the last copy up to the first bad one, and `locate` names
    the op. Arguments that an earlier call returned are the state, and are computed again; others,
    such as the batch, are kept until then, and must not be donated. Gradients are inside of the
    step: one that is not finite shows in the state, unless the step returns their norm.

    Args:
        step: does one step of training: jitted or not, with any optimizer and scaler, or without.
        every: calls between two copies.
        on_bad: "raise" raises the error, whose `last_good` has the arguments of the bad step, in
            the state before it. "report" warns, and the results have that state in place of the
            bad one, so that training goes on without the batch and those of steps that ran before
            it showed; the losses are returned as they are; three bad steps in a row raise. flax nnx
            objects and `jax.Ref`s among the arguments are put back in both cases.

    Returns:
        The wrapped step, with the same arguments and results.

    Raises:
        TypeError: `step` is not callable, or `every` is no whole number.
        ValueError: another argument is out of its range.
    """
    checked_arguments(step, every, on_bad)
    return Catch(step, every, on_bad == "raise")


Leaves = list[Any]


class Catch(CaughtStep[P, R]):
    """A `CaughtStep` of JAX."""

    _in_place = False
    _unrepeated = (
        "Repeating the steps did not give that value again: the step reads its batch itself, or "
        "other code changed an argument in place. Give the step all that it reads as arguments."
    )

    def __init__(self, step: Callable[P, R], every: int, raises: bool) -> None:
        super().__init__(step, every, raises)
        self._arrays, self._results = BatchCopies(), LastResults()
        self._next: Leaves | None = None  # what a call reads of the last one's results, if known
        self._fed: dict[int, int] = {}  # places in the results that come back as arguments
        self._infinite: frozenset[int] = frozenset()  # places of arguments that are so on purpose
        self._objects: dict[int | str, Any] = {}  # of flax nnx, of the last call
        self._references: dict[int, Any] = {}  # of the last call, by their places

    def _begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given, tree = jax.tree.flatten((args, kwargs))
        if any(issubclass(kind, jax.core.Tracer) for kind in set(map(type, given))):
            raise TypeError(
                "the step of catch was called by code that is traced, where there are no values. "
                "Write catch(jax.jit(step)), and call it outside of jit."
            )
        self._objects = nnx.objects(args, kwargs)
        self._references = {at: x for at, x in enumerate(given) if isinstance(x, jax.Ref)}
        self._next = linked = self._results.linked(given)
        changed = any(not isinstance(linked[at], Made) for at in self._fed.values())
        if not self._calls:
            found = not_finite(dict(enumerate(given)))
            self._infinite = frozenset(found)  # on purpose, such as a best loss so far
        elif changed or len(self._calls) >= self._every:
            state = {at: given[at] for at, it in enumerate(linked) if isinstance(it, Made)}
            if self._checks.now() or self._described(state, tree):
                good, _ = self._stop()  # of a bad step, whose state is good and whose batch is not
                pairs = zip(linked, given, good, strict=True)
                given = [own if isinstance(it, Made) else leaf for it, leaf, own in pairs]
                args, kwargs = self._put_back(given, tree)
                linked = given
            self._calls = []
        if not self._calls:
            self._copy = copied(given)  # from which the calls start
        copy = self._arrays.of  # of the others, the references are enough: arrays do not change
        own = [copy(n, x) if isinstance(x, np.ndarray) else _own(x) for n, x in enumerate(linked)]
        self._calls.append(Call(tree, own, {}))
        self._fed |= {leaf.at: at for at, leaf in enumerate(linked) if isinstance(leaf, Made)}
        return args, kwargs

    def _do(self, args: Any, kwargs: Any) -> tuple[R, dict[int, Any], bool]:
        self._next = None
        result = self._fn(*args, **kwargs)
        leaves, self._tree = jax.tree.flatten(result)
        # A jitted step changes no argument in place.
        in_place = self._objects or self._references
        is_jitted = isinstance(self._fn, JITTED_FUNCTION) and not in_place
        self._results.are(leaves if is_jitted else leaves + jax.tree.leaves((args, kwargs)))
        losses = self._losses(leaves)
        sent = map(AsyncCopy, map(_not_finite, losses.values()))
        return result, losses, self._checks.add(sent, jax.process_count() == 1)

    def _without(self, result: Any, before: tuple[Leaves, Any]) -> Any:
        leaves, tree = jax.tree.flatten(result)
        good = {made: before[0][at] for made, at in self._fed.items()}
        return jax.tree.unflatten(tree, [good.get(at, leaf) for at, leaf in enumerate(leaves)])

    def _bad_state(self) -> bool:
        returned, tree = self._results.alive(), self._calls[-1].tree
        places = {at: Made(made) for made, at in self._fed.items() if made in returned}
        self._next = [places.get(at) for at in range(tree.num_leaves)]
        return bool(self._described({at: returned[it.at] for at, it in places.items()}, tree))

    def _put_back(self, good: Leaves, tree: jax.tree_util.PyTreeDef) -> tuple[Any, dict[str, Any]]:
        """Give what the last call changed in place good values; return its arguments with these."""
        for at, reference in self._references.items():
            reference[...] = good[at][...]
        leaves = [self._references.get(at, leaf) for at, leaf in enumerate(good)]
        given, kwargs = jax.tree.unflatten(tree, leaves)
        args = list(given)
        for place, it in self._objects.items():
            values: Any = args if isinstance(place, int) else kwargs
            nnx.update(it, values[place])
            values[place] = it
        return tuple(args), kwargs

    def _losses(self, leaves: Leaves) -> dict[int, jax.Array]:
        """Return the floats with one element that a call returned and that are no state."""
        # Python's floats if no array is one: beside a loss they may be a time, or the best so far.
        own = {at: leaf for at, leaf in enumerate(leaves) if at not in self._fed}
        arrays = {at: x for at, x in own.items() if is_array(x) and x.size == 1 and is_float(x)}
        floats = {at: x for at, x in own.items() if type(x) is float}
        top = float(np.finfo(np.float32).max)
        return arrays or {
            at: jnp.float32(np.clip(x, -top, top) if math.isfinite(x) else x)
            for at, x in floats.items()
        }

    def _back_to(self, before: tuple[Leaves, Any] | None) -> tuple[Any, bool]:
        self._arrays, self._results = BatchCopies(), LastResults()
        if before is None:
            return None, False
        leaves, tree = before
        return self._put_back(leaves, tree), bool(self._fed)

    def _first_bad(self) -> tuple[BadStep, Any]:
        given = (leaf for call in self._calls[1:] for leaf in call.leaves)
        if any(map(_is_deleted, given)):
            return self._by_losses(_DONATED), None
        return super()._first_bad()

    def _repeated(self) -> Iterator[Repeated]:
        leaves = copied(self._copy)
        on_cpu = jax.default_backend() == "cpu"
        following = [*(call.leaves for call in self._calls[1:]), self._next or ()]
        for call, after in zip(self._calls, following, strict=True):
            before = copied(leaves)
            args, kwargs = jax.tree.unflatten(call.tree, leaves)
            try:
                result: Any = self._fn(*args, **kwargs)
            except StopIteration:  # the iterator that the step reads has ended
                return
            made = jax.tree.leaves((result, (args, kwargs)))
            state = {at: made[x.at] for at, x in enumerate(after) if isinstance(x, Made)}
            leaves = [state.get(at, x) for at, x in enumerate(after)]
            found = partial(self._described, state, call.tree)
            yield Repeated(
                self._losses(jax.tree.leaves(result)), on_cpu, found, (before, call.tree)
            )

    def _another(self, step: int, losses: str) -> str:
        return self._unrepeated

    def _name(self, at: int) -> str:
        return f" {name_of(self._tree, at, result=True)}"

    def _located(self, call: "Call", before: tuple[Leaves, Any]) -> tuple[Fault | None, str]:
        args, kwargs = jax.tree.unflatten(call.tree, before[0])
        try:
            return locate(self._fn, *args, **kwargs), ""
        except nnx.trace_errors():
            return None, _CLOSURE
        except TypeError as error:  # a step that reads values cannot be traced
            return None, str(error).strip().splitlines()[0]

    def _described(self, state: Mapping[int, Any], tree: jax.tree_util.PyTreeDef) -> str:
        """Say which part of the state is not finite; "" if none."""
        found = not_finite(state)
        bad = {at: what for at, what in found.items() if at not in self._infinite}
        return described(bad, partial(name_of, tree), " after it")


_DONATED = (
    "The steps cannot be repeated: the step donates arguments that no call of it returned, such as "
    "the batch, or a state that other code changes between the calls. Donate what it returns alone."
)

_CLOSURE = (
    "locate could not trace the step: it changes a flax nnx object, such as the random stream of "
    "a Dropout, that is no argument of it. Give it the model and the optimizer as arguments."
)


# Calls of a training step, recorded so that they can be repeated.
#
# Of a call's arguments, those that an earlier call returned are the training's state, and are
# made again when the calls are repeated; all others, such as the batch, are kept. A step may
# also change its arguments in place, as flax nnx does: they count as returned, too.


class Made(NamedTuple):
    """Stands for an argument that the call before returned."""

    at: int  # its place in the results of that call


class Call(NamedTuple):
    """A call of the step."""

    tree: jax.tree_util.PyTreeDef  # of its arguments, `(args, kwargs)`
    leaves: Leaves  # of these; what the call before returned is a `Made`
    losses: dict[int, Any]  # that it returned, by their places in the results


class LastResults:
    """Results of the last call, which are known when they come back as arguments."""

    def __init__(self) -> None:
        self._results: dict[int, tuple[Made, weakref.ref[Any]]] = {}
        self._places: list[Made] = []

    def are(self, leaves: Leaves) -> None:
        """Note the leaves that a call returned, and those that it may have changed in place."""
        self._places += map(Made, range(len(self._places), len(leaves)))
        arrays = {kind for kind in set(map(type, leaves)) if issubclass(kind, (jax.Array, jax.Ref))}
        self._results = {
            id(leaf): (place, weakref.ref(leaf))
            for place, leaf in zip(self._places, leaves, strict=False)
            if type(leaf) in arrays
        }

    def linked(self, leaves: Leaves) -> Leaves:
        """Return arguments, with a `Made` for each that is among the results."""
        found = [self._results.get(id(leaf)) for leaf in leaves]
        pairs = zip(leaves, found, strict=True)
        return [leaf if it is None or it[1]() is not leaf else it[0] for leaf, it in pairs]

    def alive(self) -> dict[int, Any]:
        """Return the results that somebody still has, by place."""
        found = {made.at: reference() for made, reference in self._results.values()}
        return {at: x for at, x in found.items() if x is not None and not _is_deleted(x)}


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def copied(leaves: Sequence[Any]) -> Leaves:
    """Return leaves with the arrays among them copied, since a step may donate or change them."""
    return [x.copy() if isinstance(x, (jax.Array, np.ndarray)) else _own(x) for x in leaves]


def _own(leaf: Any) -> Any:
    """A reference of its own in place of one, which a step changes."""
    return jax.new_ref(leaf[...]) if isinstance(leaf, jax.Ref) else leaf


# Whether the losses of a training are finite; found out on the device.


@jax.jit
def _not_finite(loss: Any) -> jax.Array:
    """Return whether a loss is Inf or NaN, bool []."""
    return ~jnp.isfinite(loss).reshape(())


def name_of(tree: jax.tree_util.PyTreeDef, at: int, result: bool = False) -> str:
    """Return the name of an argument, as the caller would write it, or of a result."""
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    path, _ = jax.tree_util.tree_leaves_with_path(numbered)[at]
    keys = jax.tree_util.keystr(path if result else path[1:])
    return f"result{keys}" if result else f"argument {keys}"
