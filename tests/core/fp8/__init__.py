"""Tests of polymp.fp8."""
