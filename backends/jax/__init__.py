"""The jax backend: casts are planned on the traced program, which is then run in those formats."""
