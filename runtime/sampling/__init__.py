"""Sampling of tokens from logits, with noise that depends on seed and position only."""
