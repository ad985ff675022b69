"""Tests of the harness itself: results, reports, plugin, command, docs."""
