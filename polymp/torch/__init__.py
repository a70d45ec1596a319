"""Mixed precision for PyTorch: `from polymp.torch import autocast, GradScaler`."""

from polymp.backends import get as _get

_get("torch")  # says what to install if torch is missing

from polymp.backends.torch.autocast.api import autocast as autocast  # noqa: E402
from polymp.backends.torch.autocast.api import is_autocast_available as is_autocast_available  # noqa: E402
from polymp.backends.torch.autocast.checkpoint import checkpoint as checkpoint  # noqa: E402
from polymp.backends.torch.autocast.custom_function import custom_bwd as custom_bwd  # noqa: E402
from polymp.backends.torch.autocast.custom_function import custom_fwd as custom_fwd  # noqa: E402
from polymp.backends.torch.autocast.custom_ops import register as register  # noqa: E402
from polymp.backends.torch.diagnostics.audit import audit as audit  # noqa: E402
from polymp.backends.torch.diagnostics.explain import explain as explain  # noqa: E402
from polymp.backends.torch.diagnostics.locate import locate as locate  # noqa: E402
from polymp.backends.torch.modules.pin import pin as pin  # noqa: E402
from polymp.backends.torch.modules.scoped import scoped as scoped  # noqa: E402
from polymp.backends.torch.scaler.expect_scaler import expect_scaler as expect_scaler  # noqa: E402
from polymp.backends.torch.scaler.grad_scaler import GradScaler as GradScaler  # noqa: E402
from polymp.backends.torch.scaler.loss_scalers import LossScalers as LossScalers  # noqa: E402
from polymp.backends.torch.weights.bake import bake as bake  # noqa: E402
from polymp.backends.torch.weights.freeze import Frozen as Frozen  # noqa: E402
from polymp.backends.torch.weights.freeze import freeze as freeze  # noqa: E402
from polymp.backends.torch.weights.hold_casts import hold_casts as hold_casts  # noqa: E402
from polymp.torch import cpu as cpu  # noqa: E402
from polymp.torch import cuda as cuda  # noqa: E402
