"""Perplexity and KL, measured through the runtime's own model."""
