"""Tests of the rule by which a loss scale changes."""
