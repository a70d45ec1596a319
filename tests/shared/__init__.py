"""Tests of what both frameworks do, from one table or history for both."""
