"""The libraries that train with torch or jax, and the line that brings polymp into each.

One table: `polymp doctor` lists the rows of what is installed, and `adapter_checks` looks in them
whether an adapter is tested with the version. Nothing here imports a library.
"""

from collections.abc import Iterator
from importlib import metadata
from typing import Any, NamedTuple

from polymp.versions import parts


class Integration(NamedTuple):
    """A library, and what to write in it.

    Attributes:
        name: of the package, as pip installs it.
        framework: "torch" or "jax"; for a library that is written for both, the one in which it
            takes the line.
        first: the first version that is tested.
        end: the first version that is not tested any more.
        line: what to write.
        adapter: the module of polymp that has it; "" for a recipe with polymp's own functions.
    """

    name: str
    framework: str
    first: tuple[int, ...]
    end: tuple[int, ...]
    line: str
    adapter: str = ""

    @property
    def bounds(self) -> str:
        """The tested versions, as pip takes them: ">=3.15,<3.16"."""
        return f">={_dotted(self.first)},<{_dotted(self.end)}"

    def is_supported(self, version: str) -> bool:
        """True if the line is tested with a version of the library."""
        return self.first <= parts(version) < self.end

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
_AUTOCAST_LOSS = "jax.value_and_grad(polymp.jax.autocast(loss_fn))"

INTEGRATIONS: tuple[Integration, ...] = (
    Integration("lightning", "torch", (2, 5), (2, 7), _PRECISION, "polymp.lightning"),
    Integration(
        "accelerate",
        "torch",
        (1, 6),
        (1, 16),
        'polymp.accelerate.use(accelerator, policy="lean")',
        "polymp.accelerate",
    ),
    Integration(
        "transformers",
        "torch",
        (5, 0),
        (5, 24),
        'polymp.transformers.use(trainer, policy="lean")',
        "polymp.transformers",
    ),
    Integration("peft", "torch", (0, 21), (0, 22), "polymp.torch.freeze(model, inputs)"),
    Integration(
        "keras", "jax", (3, 15), (3, 16), 'polymp.keras.use(model, policy="lean")', "polymp.keras"
    ),
    Integration("flax", "jax", (0, 12), (0, 13), "nnx" + _AUTOCAST_LOSS.removeprefix("jax")),
    Integration(
        "equinox",
        "jax",
        (0, 13),
        (0, 14),
        "eqx.filter_value_and_grad(polymp.jax.autocast(loss_fn))",
    ),
    Integration("dm-haiku", "jax", (0, 0, 17), (0, 1), _AUTOCAST_LOSS),
    Integration("optax", "jax", (0, 2, 8), (0, 3), "scaler.step(grads, update, params, opt_state)"),
    Integration(
        "numpyro",
        "jax",
        (0, 22),
        (0, 23),
        "polymp.jax.autocast(network) inside the model, not around it",
    ),
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


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
