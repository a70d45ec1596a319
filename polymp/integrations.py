"""The libraries that train with torch or jax, and the line that brings polymp into each.

One table: `polymp doctor` lists the rows of what is installed, and each adapter looks there
whether it is tested with the version. Nothing here imports a library.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

from polymp.code_origin import outside
from polymp.errors import BackendMissingError, VersionWarning
from polymp.versions import parts


class Integration(NamedTuple):
    """A library, and what to write in it."""

    name: str  # of the package, as pip installs it
    # "torch" or "jax"; of a library for both, the one in which it takes the line.
    framework: str
    bounds: str  # the tested versions, as pip takes them: ">=3.15,<3.16"
    line: str  # what to write
    adapter: str = ""  # the module that has it; "" for a recipe with polymp's own functions

    def is_supported(self, version: str) -> bool:
        """True if the line is tested with a version of the library."""
        first, end = map(parts, self.bounds.split(","))
        return first <= parts(version) < end

    def at(self, version: str) -> dict[str, Any]:
        """The row as plain data, with an installed version and whether that is supported."""
        return {
            "name": self.name,
            "version": version,
            "framework": self.framework,
            "tested": self.bounds,
            "supported": self.is_supported(version),
            "adapter": self.adapter,
            "line": self.line,
        }


_PRECISION = 'Trainer(plugins=[polymp.lightning.Precision("bf16-mixed", policy="lean")])'
_ACCELERATE = 'polymp.accelerate.use(accelerator, policy="lean")'
_TRANSFORMERS = 'polymp.transformers.use(trainer, policy="lean")'
_KERAS = 'polymp.keras.use(model, policy="lean")'
_AUTOCAST_LOSS = "jax.value_and_grad(polymp.jax.autocast(loss_fn))"
_EQUINOX = "eqx.filter_value_and_grad(polymp.jax.autocast(loss_fn))"
_OPTAX = "scaler.step(grads, update, params, opt_state)"
_NUMPYRO = "polymp.jax.autocast(network) inside the model, not around it"

INTEGRATIONS: tuple[Integration, ...] = (
    Integration("lightning", "torch", ">=2.5,<2.7", _PRECISION, "polymp.lightning"),
    Integration("accelerate", "torch", ">=1.6,<1.16", _ACCELERATE, "polymp.accelerate"),
    Integration("transformers", "torch", ">=5.0,<5.24", _TRANSFORMERS, "polymp.transformers"),
    Integration("peft", "torch", ">=0.21,<0.22", "polymp.torch.freeze(model, inputs)"),
    Integration("keras", "jax", ">=3.15,<3.16", _KERAS, "polymp.keras"),
    Integration("flax", "jax", ">=0.12,<0.13", "nnx" + _AUTOCAST_LOSS.removeprefix("jax")),
    Integration("equinox", "jax", ">=0.13,<0.14", _EQUINOX),
    Integration("dm-haiku", "jax", ">=0.0.17,<0.1", _AUTOCAST_LOSS),
    Integration("optax", "jax", ">=0.2.8,<0.3", _OPTAX),
    Integration("numpyro", "jax", ">=0.22,<0.23", _NUMPYRO),
)


def installed() -> Iterator[tuple[Integration, str]]:
    """Yield each library of the table that is installed, with its version; imports none."""
    for row in INTEGRATIONS:
        try:
            yield row, metadata.version(row.name)
        except metadata.PackageNotFoundError:
            continue


def of(name: str) -> Integration:
    """Return the row of a library."""
    return {row.name: row for row in INTEGRATIONS}[name]


# Checks at the start of an adapter of a training framework: its library and version, the scaler.
#
# Nothing has changed when one of these raises. Nothing here imports torch or jax.


def require(name: str) -> Any:
    """Import the library of an adapter."""
    row = of(name)
    if importlib.util.find_spec(name) is None:
        raise BackendMissingError(
            f"{row.adapter} needs the {name} package: pip install 'polymp[{name}]'."
        )
    found: ModuleType = importlib.import_module(name)
    _warn_untested(row, found.__version__)
    return found


@cache
def _warn_untested(row: Integration, version: str) -> None:
    if not row.is_supported(version):
        warnings.warn(
            f"{row.adapter} is tested with {row.name}{row.bounds}, and this is {row.name} "
            f"{version}. Install a tested version: pip install '{row.name}{row.bounds}'.",
            VersionWarning,
            stacklevel=outside(),
        )


def check_scaler(
    scaler: object,
    made: str,
    kind: type,
    enabled: Callable[[Any], bool],
    *,
    asked: str,
    half: bool,
    write: str,
) -> None:
    """Raise if a loss scaler that a user gave does not scale, or is for bfloat16."""
    if scaler is None:
        return
    if not half:
        raise ValueError(
            f"{asked} takes no scaler: loss scaling is for float16. Leave it out, or write {write}."
        )
    if not isinstance(scaler, kind):
        given = f"{type(scaler).__module__}.{type(scaler).__qualname__}".removeprefix("builtins.")
        raise TypeError(
            f"{asked} takes a {made.partition('(')[0]}, got {given}. Leave scaler out, or write "
            f"scaler={made}."
        )
    if not enabled(scaler):
        raise ValueError(
            f"{asked} needs a loss scaler, and the one given is disabled, so that small gradients "
            f"would become zero. Leave scaler out, or write scaler={made}."
        )
