"""Mixed precision for JAX: `from polymp.jax import autocast, GradScaler`."""

from polymp.backends import get as _get

_get("jax")

from polymp.backends.jax.autocast.api import autocast as autocast  # noqa: E402
from polymp.backends.jax.autocast.api import call_in as call_in  # noqa: E402
from polymp.backends.jax.autocast.api import lower as lower  # noqa: E402
from polymp.backends.jax.autocast.api import upper as upper  # noqa: E402
from polymp.backends.jax.autocast.known_functions import register as register  # noqa: E402
from polymp.backends.jax.diagnostics.audit import Audited as Audited  # noqa: E402
from polymp.backends.jax.diagnostics.audit import audit as audit  # noqa: E402
from polymp.backends.jax.diagnostics.explain import explain as explain  # noqa: E402
from polymp.backends.jax.diagnostics.locate import locate as locate  # noqa: E402
from polymp.backends.jax.modules.pin import Pins as Pins  # noqa: E402
from polymp.backends.jax.modules.pin import pin as pin  # noqa: E402
from polymp.backends.jax.modules.scoped import scoped as scoped  # noqa: E402
from polymp.backends.jax.scaler.expect_scaler import expect_scaler as expect_scaler  # noqa: E402
from polymp.backends.jax.scaler.flax_steps import linen_train_step as linen_train_step  # noqa: E402
from polymp.backends.jax.scaler.flax_steps import nnx_train_step as nnx_train_step  # noqa: E402
from polymp.backends.jax.scaler.grad_scaler import GradScaler as GradScaler  # noqa: E402
from polymp.backends.jax.scaler.optax_wrapper import scaled as scaled  # noqa: E402
from polymp.backends.jax.scaler.optimizer_step import ScaledState as ScaledState  # noqa: E402
from polymp.backends.jax.scaler.stuck_watch import StuckWatch as StuckWatch  # noqa: E402
from polymp.backends.jax.weights.freeze import Frozen as Frozen  # noqa: E402
from polymp.backends.jax.weights.freeze import freeze as freeze  # noqa: E402
