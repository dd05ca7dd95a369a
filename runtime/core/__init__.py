"""Nouns shared by all layers of the runtime."""
