"""The tests of polymp."""
