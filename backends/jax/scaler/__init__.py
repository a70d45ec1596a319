"""Loss scaling for JAX: a scaler as a value, training steps, and an optax wrapper.

Imports `compat` and the core.
"""
