"""Tests of `polymp.testing`."""
