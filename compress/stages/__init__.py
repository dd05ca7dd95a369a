"""Stages of recipes, one class per file, which registers itself in `STAGES`. Imports no torch."""
