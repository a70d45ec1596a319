"""Tests of the loss scaler in the jax backend."""
