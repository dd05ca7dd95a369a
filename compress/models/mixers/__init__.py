"""Mixers that keep a state of fixed size for each sequence in place of keys and values."""
