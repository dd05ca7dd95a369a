"""Ways to multiply by a packed weight."""
