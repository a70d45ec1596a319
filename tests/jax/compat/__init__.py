"""Tests of the private names of jax that polymp uses."""
