"""The model that `polymp doctor --model` and `polymp check --model` name: MODULE:FUNCTION."""

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from polymp.errors import UsageError


class Example(NamedTuple):
    """A model and its example inputs."""

    framework: str  # "torch" if the model is a torch module, else "jax"
    model: Any  # a torch module, or a function of arrays
    inputs: tuple[Any, ...]  # positional arguments of a call


def leave_memory() -> None:
    """Keep jax from taking most of a GPU's memory when it is imported."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def example(text: str) -> Example:
    """Call a function that returns a model and its inputs: "train:example"."""
    # The module is imported as `python -m` would import it, with the current folder first.
    option = f"--model {text}"
    module, _, name = text.partition(":")
    names = module.split(".")
    if module.endswith(".py") or not name.isidentifier() or not all(map(str.isidentifier, names)):
        plain = ".".join(Path(module).with_suffix("").parts) if module.endswith(".py") else ""
        hint = f" Write {plain}:{name or 'example'}." if plain else ""
        raise UsageError(
            f"{option}: this is not MODULE:FUNCTION, as train:example for the function example in "
            f"train.py.{hint}"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            why = f"there is no module {missing!r}, neither installed nor in {here}."
        else:
            why = f"importing {module} failed: {error_line(error)}"
        raise UsageError(f"{option}: {why}") from error
    function = getattr(imported, name, None)
    if not callable(function):
        own = [n for n, x in vars(imported).items() if getattr(x, "__module__", "") == module]
        has = f"It has {', '.join(own)}." if own else "It has no functions."
        raise UsageError(f"{option}: module {module!r} has no function {name!r}. {has}")
    try:
        result = function()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{option}: {name}() failed: {error_line(error)}") from error
    return _checked(result, f"{option}: {name}()")


def _checked(result: object, what: str) -> Example:
    returns = (
        "Return (model, inputs): a torch module and the tuple of its inputs, or a JAX function and "
        "the tuple of its arguments."
    )
    if not isinstance(result, tuple) or len(result) != 2:
        kind = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise UsageError(f"{what} returned {kind}. {returns}")
    model, inputs = result
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


def error_line(error: BaseException) -> str:
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
    return UsageError(
        f"--model {text}: calling the model on its inputs failed: {error_line(error)}"
    )
