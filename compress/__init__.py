"""Offline half of the toolkit: a dense checkpoint goes in, a packed checkpoint comes out."""
