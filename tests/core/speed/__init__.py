"""Tests of the dtype that is advised and of predicted times."""
