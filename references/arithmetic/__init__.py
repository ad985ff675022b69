"""What a number is and how it is rounded: bits, casts, elementary functions, random bits."""
