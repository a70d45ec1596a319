"""Mixed precision for JAX. The backend is not part of this version; importing this says so."""

from polymp.backends import get as _get

_get("jax")
