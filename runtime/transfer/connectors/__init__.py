"""Ways to move memory between engines, one a file."""
