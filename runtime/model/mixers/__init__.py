"""Mixers that are no plain attention: what takes the place of queries, keys and values in a layer."""
