"""The whole layer."""
