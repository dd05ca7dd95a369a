"""Pieces that both packages use at every level: errors, terminal, devices and files."""
