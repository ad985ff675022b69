"""What is kept and compared beyond one run: witnesses, drift, distances."""
