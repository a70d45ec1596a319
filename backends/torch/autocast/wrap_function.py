"""Functions of all kinds that run in a region: plain ones, generators, coroutines."""

# The annotations below are not evaluated: `P.args` is a new object each time, and torch.compile
# would guard on the one that it saw.
from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, Protocol

from torch.compiler import is_dynamo_compiling

P = ParamSpec("P")


class Region(Protocol):
    """The parts of an `autocast` that are needed here."""

    def __enter__(self) -> object: ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> bool | None: ...

    def _again(self) -> AbstractContextManager[None]: ...


def wrapped(region: Region, func: Callable[P, Any]) -> Callable[P, Any]:
    """Wrap a function so that its body runs in a region; a generator's step by step."""

    @functools.wraps(func)
    def function(*args: P.args, **kwargs: P.kwargs) -> Any:
        if is_dynamo_compiling():
            with region._again():
                return func(*args, **kwargs)
        with region:
            return func(*args, **kwargs)

    @functools.wraps(func)
    def generator(*args: P.args, **kwargs: P.kwargs) -> Any:
        return (yield from _steps(region, func(*args, **kwargs)))

    @functools.wraps(func)
    async def coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
        return await _awaitable_steps(region, func(*args, **kwargs))

    if inspect.isasyncgenfunction(func):
        return _async_generator(region, func)
    if inspect.iscoroutinefunction(func):
        return coroutine
    return generator if inspect.isgeneratorfunction(func) else function


def _steps(region: Region, inner: Any) -> Generator[Any, Any, Any]:
    """Run a generator or coroutine to its end, each step in the region."""
    step = functools.partial(inner.send, None)
    while True:
        try:
            with region:
                value = step()
        except StopIteration as end:
            return end.value
        try:
            sent = yield value
        except GeneratorExit:
            with region:
                inner.close()
            raise
        except BaseException as error:
            step = functools.partial(inner.throw, error)
        else:
            step = functools.partial(inner.send, sent)


_awaitable_steps = types.coroutine(_steps)


def _async_generator(region: Region, func: Callable[P, Any]) -> Callable[P, Any]:
    @functools.wraps(func)
    async def async_generator(*args: P.args, **kwargs: P.kwargs) -> Any:
        inner = func(*args, **kwargs)
        step = inner.asend(None)
        while True:
            try:
                value = await _awaitable_steps(region, step)
            except StopAsyncIteration:
                return
            try:
                sent = yield value
            except GeneratorExit:
                await _awaitable_steps(region, inner.aclose())
                raise
            except BaseException as error:
                step = inner.athrow(error)
            else:
                step = inner.asend(sent)

    return async_generator
