"""What a chip does with numbers: its dot-product units."""
