"""Tests of the adapters for libraries that train with jax."""
