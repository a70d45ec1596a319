"""Tests of rules by module path and of pinned parameters in the torch backend."""
