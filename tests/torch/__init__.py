"""Tests of what only the torch backend has."""
