"""Online half of the toolkit: loads a packed checkpoint and turns it into tokens."""
