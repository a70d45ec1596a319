"""The torch backend: the core's decision at the dispatcher's autocast keys, and a fused scaler."""

from polymp.backends.torch.autocast import PolicyLike as PolicyLike
from polymp.backends.torch.autocast import autocast as autocast
from polymp.backends.torch.autocast import is_autocast_available as is_autocast_available
from polymp.backends.torch.checkpoint import checkpoint as checkpoint
from polymp.backends.torch.custom_function import custom_bwd as custom_bwd
from polymp.backends.torch.custom_function import custom_fwd as custom_fwd
from polymp.backends.torch.scaler import GradScaler as GradScaler
from polymp.backends.torch.scaler import OptState as OptState
