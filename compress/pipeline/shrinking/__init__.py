"""Structured pruning: the choice of what leaves a model, and the source that has the rest."""
