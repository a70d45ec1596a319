"""Tests of reports and audits made by hand: their numbers, text, pages and pictures."""
