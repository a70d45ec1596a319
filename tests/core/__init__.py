"""Tests of the rooms that know no framework."""
