"""The two grouped GEMMs."""
