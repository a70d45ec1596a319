"""Tests of what only the jax backend has."""
