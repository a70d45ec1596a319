"""Tests of the products of a model in the jax backend."""
