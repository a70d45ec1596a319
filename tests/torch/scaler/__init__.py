"""Tests of the loss scaler in the torch backend."""
