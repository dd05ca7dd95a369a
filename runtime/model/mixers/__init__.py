"""Mixers of tokens, one file each: what loads it, and what computes it in plain torch."""
