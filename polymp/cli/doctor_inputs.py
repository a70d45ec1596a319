"""The inputs of `polymp doctor --measure`: shapes, seconds, and a model by name."""

import argparse
import importlib
import re
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from polymp.errors import UsageError


class Example(NamedTuple):
    """A model and its example inputs.

    Attributes:
        framework: "torch" if the model is a torch module, else "jax".
        model: a torch module, or a function of arrays.
        inputs: positional arguments of a call.
    """

    framework: str
    model: Any
    inputs: tuple[Any, ...]


def shapes(text: str) -> list[tuple[int, int, int]]:
    """Read shapes of linear layers: "512x512x2048,1x768x3072"."""
    found = []
    for part in text.split(","):
        sizes = re.fullmatch(r"\s*([1-9]\d*)x([1-9]\d*)x([1-9]\d*)\s*", part)
        if sizes is None:
            raise argparse.ArgumentTypeError(
                f"{part!r} is no shape of a linear layer. Write rows x inputs x outputs, with "
                "commas between shapes: 512x512x2048,1x768x3072."
            )
        m, k, n = map(int, sizes.groups())
        found.append((m, k, n))
    return list(dict.fromkeys(found))


def seconds(text: str) -> float:
    """Read a time to measure for."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.5 <= found <= 600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.5 to 600.")
    return found


def example(text: str) -> Example:
    """Call a function of the user's that returns a model and its inputs: "train:example".

    The module is imported as `python -m` would import it, with the current folder first.

    Args:
        text: MODULE:FUNCTION.

    Returns:
        The model and its inputs.

    Raises:
        UsageError: there is no such function, it fails, or it returns something else.
    """
    given = f"--model {text}"
    module, _, name = text.partition(":")
    names = module.split(".")
    if module.endswith(".py") or not name.isidentifier() or not all(map(str.isidentifier, names)):
        plain = ".".join(Path(module).with_suffix("").parts) if module.endswith(".py") else ""
        hint = f" Write {plain}:{name or 'example'}." if plain else ""
        raise UsageError(
            f"{given}: this is not MODULE:FUNCTION, as train:example for the function example in "
            f"train.py.{hint}"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            why = f"there is no module {missing!r}, neither installed nor in {here}."
        else:
            why = f"importing {module} failed: {_said(error)}"
        raise UsageError(f"{given}: {why}") from error
    function = getattr(found, name, None)
    if not callable(function):
        own = [n for n, x in vars(found).items() if getattr(x, "__module__", "") == module]
        has = f"It has {', '.join(own)}." if own else "It has no functions."
        raise UsageError(f"{given}: module {module!r} has no function {name!r}. {has}")
    try:
        made = function()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{given}: {name}() failed: {_said(error)}") from error
    return _checked(made, f"{given}: {name}()")


def _checked(made: object, what: str) -> Example:
    returns = (
        "Return (model, inputs): a torch module and the tuple of its inputs, or a JAX function and "
        "the tuple of its arguments."
    )
    if not isinstance(made, tuple) or len(made) != 2:
        kind = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise UsageError(f"{what} returned {kind}. {returns}")
    model, inputs = made
    if not callable(model):
        raise UsageError(f"{what} returned {type(model).__name__} for a model. {returns}")
    if not isinstance(inputs, tuple):
        raise UsageError(
            f"{what} returned {type(inputs).__name__} for the inputs. {returns} A single input x "
            "is the tuple (x,)."
        )
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(model, torch.nn.Module)
    return Example("torch" if is_torch else "jax", model, inputs)


def _said(error: BaseException) -> str:
    """The type and first line of an error, and the last line of the user's folder on its way."""
    try:
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    except Exception as broken:
        text = f"{type(error).__name__}, whose text cannot be had: {type(broken).__name__}"
    frames = reversed(traceback.extract_tb(error.__traceback__))
    own = (f for f in frames if Path(f.filename).is_relative_to(Path.cwd()))
    at = next((f"{Path(f.filename).relative_to(Path.cwd())}:{f.lineno}" for f in own), "")
    return f"{text} ({at})" if at else text


def failed(text: str, error: BaseException) -> UsageError:
    """The error of a model whose call fails."""
    return UsageError(f"--model {text}: calling the model on its inputs failed: {_said(error)}")
