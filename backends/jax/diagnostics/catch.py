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
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from polymp.backends.jax.arrays import AsyncCopy, is_float, is_inexact
from polymp.backends.jax.diagnostics import locate as finder
from polymp.backends.jax.modules import nnx
from polymp.diagnostics.audit_records import Fault
from polymp.diagnostics.bad_step import (
    SOMETHING,
    BadStep,
    BatchCopies,
    CaughtStep,
    Decorator,
    LossChecks,
    bad_loss,
    checked_arguments,
    described,
    first_difference,
    warn,
)

P = ParamSpec("P")
R = TypeVar("R")


@overload
def catch(
    step: Callable[P, R],
    *,
    every: int = ...,
    on_bad: Literal["raise", "report"] = ...,
) -> "Catch[P, R]": ...


@overload
def catch(
    step: None = None,
    *,
    every: int = ...,
    on_bad: Literal["raise", "report"] = ...,
) -> "Callable[[Callable[P, R]], Catch[P, R]]": ...


def catch(
    step: Callable[P, R] | None = None,
    *,
    every: int = 100,
    on_bad: Literal["raise", "report"] = "raise",
) -> "Catch[P, R] | Callable[[Callable[P, R]], Catch[P, R]]":
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
            bad one, so that training goes on without the batch; the losses are returned as they
            are; three bad steps in a row raise. flax nnx objects among the arguments are put back
            in both cases.

    Returns:
        The wrapped step, with the same arguments and results; without `step`, a decorator.

    Raises:
        TypeError: `step` is not callable, or `every` is no whole number.
        ValueError: another argument is out of its range.
    """
    checked_arguments(step, every, on_bad)
    if step is None:
        return Decorator(lambda fn: catch(fn, every=every, on_bad=on_bad))
    return Catch(step, every, on_bad == "raise")


Leaves = list[Any]


class Catch(CaughtStep, Generic[P, R]):
    """A `CaughtStep` of JAX."""

    def __init__(self, step: Callable[P, R], every: int, raises: bool) -> None:
        super().__init__(step, every, raises)
        self._fn = step
        self._recorded = RecordedCalls()
        self._fed: dict[int, int] = {}  # places in the results that come back as arguments
        self._infinite: frozenset[int] = frozenset()  # places of arguments that are so on purpose
        self._objects: dict[int | str, Any] = {}  # of flax nnx, of the last call
        self._checks = LossChecks()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Do a step, and check it.

        Args:
            args: of the step.
            kwargs: of the step.

        Returns:
            The step's results.

        Raises:
            BadStepError: a value is not finite.
            TypeError: the call is traced.

        Warns:
            CatchWarning: likewise, if `on_bad` is "report".
        """
        given, tree = jax.tree.flatten((args, kwargs))
        if any(issubclass(kind, jax.core.Tracer) for kind in set(map(type, given))):
            raise TypeError(
                "the step of catch was called by code that is traced, where there are no values. "
                "Write catch(jax.jit(step)), and call it outside of jit."
            )
        positional: Any = args
        named: Any = kwargs
        self._objects = nnx.objects(args, kwargs)
        linked = self._recorded.linked(given)
        changed = any(not isinstance(linked[at], Made) for at in self._fed.values())
        if not self._recorded.calls or changed or len(self._recorded.calls) >= self._every:
            good = self._good(given, linked, tree)
            if good is not given:  # of a bad step, whose state is good and whose batch is not
                pairs = zip(linked, given, good, strict=True)
                good = [state if isinstance(it, Made) else leaf for it, leaf, state in pairs]
                positional, named = self._put_back(jax.tree.unflatten(tree, good))
            self._recorded.restart(good)
            linked = self._recorded.linked(good)
        recorded = self._recorded
        recorded.add(linked, tree)
        self._fed |= {leaf.at: at for at, leaf in enumerate(linked) if isinstance(leaf, Made)}
        self.step += 1
        result = self._fn(*positional, **named)
        leaves, of_result = jax.tree.flatten(result)
        recorded.returned(leaves + jax.tree.leaves(self._changeable((positional, named))))
        losses = self._losses(leaves)
        recorded.calls[-1].losses.update(losses)
        if self.step == 1 and not losses:
            warn(
                "catch: the step returns no loss, a float with one element, so that only the "
                f"state is checked, every {self._every} calls. Return the loss."
            )
        sent = map(AsyncCopy, map(_not_finite, losses.values()))
        if not self._checks.add(sent, jax.process_count() == 1):
            return result
        good = self._stop(None, tree)
        back = {made: at for made, at in self._fed.items() if made < len(leaves)}
        kept = [good[back[at]] if at in back else leaf for at, leaf in enumerate(leaves)]
        return jax.tree.unflatten(of_result, kept)  # type: ignore[no-any-return]

    def check(self) -> None:
        """Check what the last step returned, and wait for the device: before saving a checkpoint.

        What the program has let go of is not checked.

        Raises:
            BadStepError: a value is not finite, whatever `on_bad` is.
        """
        if not (calls := self._recorded.calls):
            return
        returned, tree = self._recorded.alive(), calls[-1].tree
        state = {at: returned[made] for made, at in self._fed.items() if made in returned}
        places = {at: made for made, at in self._fed.items()}
        last = [Made(places[at]) if at in state else None for at in range(tree.num_leaves)]
        if self._checks.now() or self._described(state, tree):
            raises, self._raises = self._raises, True
            try:
                self._stop(last, tree)
            finally:
                self._raises = raises

    def _good(self, leaves: Leaves, linked: Leaves, tree: jax.tree_util.PyTreeDef) -> Leaves:
        """Return arguments that are finite: these, or if they are not, those of a bad step."""
        if not self._recorded.calls:
            found = not_finite(dict(enumerate(leaves)))
            self._infinite = frozenset(found)  # on purpose, such as a best loss so far
            return leaves
        state = {at: leaves[at] for at, it in enumerate(linked) if isinstance(it, Made)}
        if self._checks.now() or self._described(state, tree):
            return self._stop(linked, tree)
        return leaves

    def _put_back(self, good: tuple[Any, dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
        """Give the flax nnx objects of the last call good values; return these with them."""
        args, kwargs = list(good[0]), dict(good[1])
        for place, it in self._objects.items():
            values: Any = args if isinstance(place, int) else kwargs
            nnx.update(it, values[place])
            values[place] = it
        return tuple(args), kwargs

    def _changeable(self, arguments: tuple[Any, dict[str, Any]]) -> object:
        """Return the arguments if the step may change them in place; a jitted one changes none."""
        is_jitted = isinstance(self._fn, _JITTED) and not self._objects
        return None if is_jitted else arguments

    def _losses(self, leaves: Leaves) -> dict[int, jax.Array]:
        """Return the floats with one element that a call returned and that are no state.

        Python's floats if no array is one: beside a loss they may be a time, or the best so far.
        """
        own = {at: leaf for at, leaf in enumerate(leaves) if at not in self._fed}
        arrays = {at: x for at, x in own.items() if np.size(x) == 1 and is_float(x)}
        floats = {at: x for at, x in own.items() if type(x) is float}
        top = float(np.finfo(np.float32).max)
        return arrays or {
            at: jnp.float32(np.clip(x, -top, top) if math.isfinite(x) else x)
            for at, x in floats.items()
        }

    def _stop(self, last: Leaves | None, tree: jax.tree_util.PyTreeDef) -> Leaves:
        """Find the first bad step, and say which it was."""
        report, good = self._replayed(last)
        self._recorded = RecordedCalls()
        self._checks = LossChecks()
        last_good = None if good is None else self._put_back(jax.tree.unflatten(tree, good))
        self._stopped(report, last_good, goes_on=good is not None and bool(self._fed))
        assert good is not None, "otherwise it has raised"
        return good

    def _replayed(self, last: Leaves | None) -> tuple[BadStep, Leaves | None]:
        calls = self._recorded.calls
        here, many = self.step - len(calls), len(calls)
        given = (leaf for call in calls[1:] for leaf in call.leaves)  # the first's were copied
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in given):
            return BadStep(self.step - 1, SOMETHING, undone=0, note=_DONATED), None
        losses: list[float] = []
        repeated = enumerate(self._recorded.repeated(self._fn, last))
        for at, (call, before, result, state) in repeated:
            again = self._losses(jax.tree.leaves(result))
            pairs = [
                (float(was), float(again[place]), was.dtype.name)
                for place, was in call.losses.items()
                if place in again
            ]
            # It is another training: see the note.
            if first_difference(pairs, on_cpu=jax.default_backend() == "cpu"):
                words = [bad_loss(call.losses) for call in calls]
                bad = next((n for n, found in enumerate(words) if found), many - 1)
                seen = tuple(float(x) for call in calls[:bad] for x in call.losses.values())
                found = words[bad] or SOMETHING
                return BadStep(here + bad, found, None, seen, 0, _UNREPEATED), None
            if found := bad_loss(again) or self._described(state, call.tree):
                fault, note = _located(self._fn, before, call.tree)
                return BadStep(here + at, found, fault, tuple(losses), many - at, note), before
            losses += map(float, again.values())
        return BadStep(self.step - 1, SOMETHING, None, tuple(losses), 0, _UNREPEATED), None

    def _described(self, state: Mapping[int, Any], tree: jax.tree_util.PyTreeDef) -> str:
        """Say which part of the state is not finite; "" if none."""
        found = not_finite(state)
        bad = {at: what for at, what in found.items() if at not in self._infinite}
        return described(bad, partial(name_of, tree), " after it")


_JITTED = type(jax.jit(lambda: None))

_DONATED = (
    "The steps cannot be repeated: the step donates arguments that no call of it returned, such as "
    "the batch, or a state that other code changes between the calls. Donate what it returns alone."
)

_UNREPEATED = (
    "Repeating the steps did not give that value again: the step reads its batch itself, or other "
    "code changed an argument in place. Give the step all that it reads as arguments."
)

_CLOSURE = (
    "locate could not trace the step: it changes a flax nnx object, such as the random stream of "
    "a Dropout, that is no argument of it. Give it the model and the optimizer as arguments."
)


def _located(
    fn: Callable[..., object], leaves: Leaves, tree: jax.tree_util.PyTreeDef
) -> tuple[Fault | None, str]:
    args, kwargs = jax.tree.unflatten(tree, leaves)
    try:
        return finder.locate(fn, *args, **kwargs), ""
    except nnx.trace_errors():
        return None, _CLOSURE
    except jax.errors.JAXTypeError as error:  # a step that reads values cannot be traced
        line = str(error).strip().splitlines()[0]
        return None, f"locate could not trace the step: {line} Wrap the part that is jitted."


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


class RecordedCalls:
    """The calls of a step since a copy of its arguments."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._start: Leaves = []
        self._arrays = BatchCopies()
        self._results: dict[int, tuple[Made, weakref.ref[Any]]] = {}
        self._places: list[Made] = []

    def restart(self, leaves: Leaves) -> None:
        """Forget the calls, and copy the arguments of the next one."""
        self.calls = []
        self._start = copied(leaves)

    def add(self, linked: Leaves, tree: jax.tree_util.PyTreeDef) -> None:
        """Record a call that is about to be made, with its arguments as `linked` returns them.

        Of numpy arrays it keeps copies.
        """
        arrays = self._arrays.of
        own = [arrays(n, x) if isinstance(x, np.ndarray) else x for n, x in enumerate(linked)]
        self.calls.append(Call(tree, own, {}))

    def linked(self, leaves: Leaves) -> Leaves:
        """Return the arguments, with a `Made` for each that the last call returned."""
        found = [self._results.get(id(leaf)) for leaf in leaves]
        pairs = zip(leaves, found, strict=True)
        return [leaf if it is None or it[1]() is not leaf else it[0] for leaf, it in pairs]

    def returned(self, leaves: Leaves) -> None:
        """Note the leaves that the call returned, and those that it may have changed in place."""
        self._places += map(Made, range(len(self._places), len(leaves)))
        arrays = {kind for kind in set(map(type, leaves)) if issubclass(kind, jax.Array)}
        self._results = {
            id(leaf): (place, weakref.ref(leaf))
            for place, leaf in zip(self._places, leaves, strict=False)
            if type(leaf) in arrays
        }

    def alive(self) -> dict[int, jax.Array]:
        """Return the results of the last call that somebody still has, by place."""
        found = {made.at: reference() for made, reference in self._results.values()}
        return {at: x for at, x in found.items() if x is not None and not x.is_deleted()}

    def repeated(
        self, step: Callable[..., object], last: Leaves | None = None
    ) -> Iterator[tuple[Call, Leaves, object, dict[int, Any]]]:
        """Repeat the calls, one at a time.

        Of each: a copy of its arguments, its result, and what the next call reads of it, by place.
        """
        leaves = copied(self._start)
        following = [*(call.leaves for call in self.calls[1:]), last]
        for call, after in zip(self.calls, following, strict=True):
            before = copied(leaves)
            given, named = jax.tree.unflatten(call.tree, leaves)
            try:
                result = step(*given, **named)
            except StopIteration:  # the iterator that the step reads has ended
                return
            made = jax.tree.leaves((result, (given, named)))
            state = {i: made[x.at] for i, x in enumerate(after or ()) if isinstance(x, Made)}
            leaves = [state.get(i, x) for i, x in enumerate(after or ())]
            yield call, before, result, state


def copied(leaves: Sequence[Any]) -> Leaves:
    """Return leaves with the arrays among them copied, since a step may donate or change them."""
    return [x.copy() if isinstance(x, (jax.Array, np.ndarray)) else x for x in leaves]


# Whether the losses of a training are finite; found out on the device.


@jax.jit
def _not_finite(loss: Any) -> jax.Array:
    """Return whether a loss is Inf or NaN, bool []."""
    return ~jnp.isfinite(loss).reshape(())


# Which arguments of a call are not finite, and their names as the caller would write them.


@jax.jit
def _finite(arrays: Sequence[jax.Array]) -> jax.Array:
    """Whether each array is finite: bool [2, n], whether it has no NaN, and no Inf."""
    return jnp.stack([jnp.array([~jnp.isnan(x).any(), ~jnp.isinf(x).any()]) for x in arrays], 1)


def not_finite(leaves: Mapping[int, Any]) -> dict[int, str]:
    """Return the places of arrays that have Inf or NaN: "Inf" or "NaN". Waits for the device."""
    by_devices: dict[frozenset[jax.Device], list[int]] = {}
    for at, leaf in leaves.items():
        if is_inexact(leaf) and np.size(leaf):
            devices = leaf.sharding.device_set if isinstance(leaf, jax.Array) else ()
            by_devices.setdefault(frozenset(devices), []).append(at)
    found = {}
    for places in by_devices.values():
        no_nan, no_inf = np.asarray(_finite([leaves[at] for at in places]))
        for at, numbers, bounded in zip(places, no_nan, no_inf, strict=True):
            if not (numbers and bounded):
                found[at] = "NaN" if not numbers else "Inf"
    return dict(sorted(found.items()))


def name_of(tree: jax.tree_util.PyTreeDef, at: int) -> str:
    """Return the name of an argument, as the caller would write it."""
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    path, _ = jax.tree_util.tree_leaves_with_path(numbered)[at]
    return f"argument {jax.tree_util.keystr(path[1:])}"
