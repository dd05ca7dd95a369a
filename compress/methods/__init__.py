"""Compression methods, one per file, which register themselves."""
