"""Mixers of tokens: attention, and those that keep a state of fixed size in place of keys and values."""
