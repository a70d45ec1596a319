"""Tests of explain, audit and locate in the jax backend."""
