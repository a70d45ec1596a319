"""Mixed precision for JAX: `from polymp.jax import autocast, GradScaler`."""

from polymp.backends import get as _get

_get("jax")

from polymp.backends.jax.audit import Audited as Audited  # noqa: E402
from polymp.backends.jax.audit import audit as audit  # noqa: E402
from polymp.backends.jax.audit import locate as locate  # noqa: E402
from polymp.backends.jax.autocast import autocast as autocast  # noqa: E402
from polymp.backends.jax.autocast import call_in as call_in  # noqa: E402
from polymp.backends.jax.autocast import lower as lower  # noqa: E402
from polymp.backends.jax.autocast import upper as upper  # noqa: E402
from polymp.backends.jax.expecting import expect_scaler as expect_scaler  # noqa: E402
from polymp.backends.jax.explain import explain as explain  # noqa: E402
from polymp.backends.jax.flax_steps import linen_train_step as linen_train_step  # noqa: E402
from polymp.backends.jax.flax_steps import nnx_train_step as nnx_train_step  # noqa: E402
from polymp.backends.jax.freeze import Frozen as Frozen  # noqa: E402
from polymp.backends.jax.freeze import freeze as freeze  # noqa: E402
from polymp.backends.jax.functions import register as register  # noqa: E402
from polymp.backends.jax.optimizers import scaled as scaled  # noqa: E402
from polymp.backends.jax.pinned import Pins as Pins  # noqa: E402
from polymp.backends.jax.pinned import pin as pin  # noqa: E402
from polymp.backends.jax.scaler import GradScaler as GradScaler  # noqa: E402
from polymp.backends.jax.scoped import scoped as scoped  # noqa: E402
from polymp.backends.jax.stepping import ScaledState as ScaledState  # noqa: E402
from polymp.backends.jax.watching import StuckWatch as StuckWatch  # noqa: E402
