"""`catch` of both frameworks: its arguments, and the class that it wraps no method of."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest

from tests.conftest import FRAMEWORKS, need


@pytest.fixture(params=FRAMEWORKS)
def catch(request: pytest.FixtureRequest) -> Any:
    need(request.param)
    return import_module(f"polymp.{request.param}").catch


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"every": 0}, ValueError,
         "catch(every=...) is a number of steps, a positive int, got 0"),
        ({"every": 2.0}, TypeError,
         "catch(every=...) is a number of steps, a positive int, got 2.0"),
        ({"every": True}, TypeError,
         "catch(every=...) is a number of steps, a positive int, got True"),
        ({"on_bad": "stop"}, ValueError, "catch(on_bad=...) is 'raise' or 'report', got 'stop'"),
        ({"jump": 1.0}, ValueError,
         "catch(jump=...) is the factor by which a loss may grow, above 1, or None, got 1.0"),
    ],
)  # fmt: skip
def test_wrong_arguments(
    catch: Any, kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        catch(print, **kwargs)


def test_a_result_instead_of_the_function(catch: Any) -> None:
    with pytest.raises(TypeError) as raised:
        catch(1.5)
    assert str(raised.value) == (
        "catch(step) needs the function that does a training step, got 1.5. Give the function, not "
        "what it returned."
    )


def test_a_method_that_is_wrapped_in_its_class(catch: Any) -> None:
    class Wrapped:
        @catch
        def step(self, x: Any) -> Any:
            return x

    assert Wrapped.step.reports == []
    with pytest.raises(TypeError) as raised:
        Wrapped().step(1.0)
    assert str(raised.value) == (
        "catch wraps a function, or the method of one object, and Wrapped.step was wrapped in its "
        "class. Remove the decorator, and write in __init__: self.step = catch(self.step)"
    )
