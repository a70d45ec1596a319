"""Functions in threads of their own, with what they return or raise."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """What the functions return, all at once; the threads have ended then."""
    with ThreadPoolExecutor(len(functions)) as pool:
        started = [pool.submit(function) for function in functions]
    return [each.result() for each in started]


def in_thread(function: Callable[[], Any]) -> Any:
    """What the function returns in a thread of its own."""
    return in_threads([function])[0]
