"""Policies of a simulation, a file each."""
