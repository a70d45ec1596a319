"""Mixed precision for Lightning: a precision plugin for `Trainer`, and one for `Fabric`.

    Trainer(plugins=[polymp.lightning.Precision("16-mixed", policy="lean")])
    Fabric(plugins=[polymp.lightning.FabricPrecision("16-mixed", policy="lean")])

A plugin opens the region around the steps of a `LightningModule`, or around the modules that Fabric
has set up, and has the loss scaler.
"""

from polymp import backends
from polymp.integrations import require

backends.require("torch")
require("lightning")

from polymp.lightning.fabric import FabricPrecision  # noqa: E402
from polymp.lightning.trainer import Precision, catch  # noqa: E402

__all__ = ["FabricPrecision", "Precision", "catch"]


def __dir__() -> list[str]:
    return __all__
