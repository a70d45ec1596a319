"""Tests of polymp.weights."""
