"""Functions of all kinds that run in a region: plain ones, generators, coroutines."""

import functools
import inspect
import types
from collections.abc import Callable, Generator
from typing import Any

from torch.compiler import is_dynamo_compiling


def wrapped(region: Any, func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its body runs in a region; a generator's step by step."""
    if inspect.isasyncgenfunction(func):
        return _async_generator(region, func)
    if inspect.iscoroutinefunction(func):
        return _coroutine(region, func)
    if inspect.isgeneratorfunction(func):
        return _generator(region, func)
    return _function(region, func)


def _function(region: Any, func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def function(*args: object, **kwargs: object) -> Any:
        if is_dynamo_compiling():
            with region._again():
                return func(*args, **kwargs)
        with region:
            return func(*args, **kwargs)

    return function


def _steps(region: Any, inner: Any) -> Generator[Any, Any, Any]:
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


def _generator(region: Any, func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def generator(*args: object, **kwargs: object) -> Any:
        return (yield from _steps(region, func(*args, **kwargs)))

    return generator


def _coroutine(region: Any, func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    async def coroutine(*args: object, **kwargs: object) -> Any:
        return await _awaitable_steps(region, func(*args, **kwargs))

    return coroutine


def _async_generator(region: Any, func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    async def async_generator(*args: object, **kwargs: object) -> Any:
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
