"""Tests of autocast in the torch backend."""
