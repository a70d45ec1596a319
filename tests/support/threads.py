"""Functions in threads of their own, with what they return or raise."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run functions at the same time, each in a new thread, and return their results."""
    with ThreadPoolExecutor(len(functions)) as pool:
        started = [pool.submit(function) for function in functions]
    return [each.result() for each in started]


def in_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a new thread, and return its result."""
    return in_threads([function])[0]
