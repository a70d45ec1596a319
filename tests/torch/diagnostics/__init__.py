"""Tests of explain, audit and locate in the torch backend."""
