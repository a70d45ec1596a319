"""Tests of weights that are stored or kept low in the jax backend."""
