"""Tests of policies, scopes, regions, dtypes and the vocabulary."""
