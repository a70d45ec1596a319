"""Tests of autocast in the jax backend."""
