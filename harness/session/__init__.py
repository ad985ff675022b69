"""One run of pytest: options, records, environment."""
