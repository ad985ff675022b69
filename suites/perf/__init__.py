"""Speed: measured alone, never under xdist."""
