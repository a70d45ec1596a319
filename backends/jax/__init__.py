"""The jax backend: casts are planned on the traced program, which is then run in those dtypes."""

from polymp.versions import require

require("jax")  # says what to install if it is missing
