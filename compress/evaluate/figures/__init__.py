"""Figures that a gate may limit, one file for each kind: a row that registers itself."""
