"""Diagnosis of checkpoints that any tool wrote: findings as data, each with its remedy."""
