"""Mixed precision for PyTorch: `from polymp.torch import autocast, GradScaler`."""

from polymp.backends import get as _get

_get("torch")  # says what to install if torch is missing

from polymp.backends.torch import GradScaler as GradScaler  # noqa: E402
from polymp.backends.torch import autocast as autocast  # noqa: E402
from polymp.backends.torch import checkpoint as checkpoint  # noqa: E402
from polymp.backends.torch import custom_bwd as custom_bwd  # noqa: E402
from polymp.backends.torch import custom_fwd as custom_fwd  # noqa: E402
from polymp.backends.torch import is_autocast_available as is_autocast_available  # noqa: E402
from polymp.backends.torch.audit import audit as audit  # noqa: E402
from polymp.backends.torch.bake import bake as bake  # noqa: E402
from polymp.backends.torch.expecting import expect_scaler as expect_scaler  # noqa: E402
from polymp.backends.torch.explain import explain as explain  # noqa: E402
from polymp.backends.torch.freeze import Frozen as Frozen  # noqa: E402
from polymp.backends.torch.freeze import freeze as freeze  # noqa: E402
from polymp.backends.torch.hold_casts import hold_casts as hold_casts  # noqa: E402
from polymp.backends.torch.locate import locate as locate  # noqa: E402
from polymp.backends.torch.loss_scalers import LossScalers as LossScalers  # noqa: E402
from polymp.backends.torch.pinned import pin as pin  # noqa: E402
from polymp.backends.torch.registered import register as register  # noqa: E402
from polymp.backends.torch.scoped import scoped as scoped  # noqa: E402
from polymp.torch import cpu as cpu  # noqa: E402
from polymp.torch import cuda as cuda  # noqa: E402
