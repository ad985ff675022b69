"""Checks: properties of (kernel, case), each with a verdict."""
