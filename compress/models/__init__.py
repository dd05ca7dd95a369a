"""Declarative facts per model family: blocks, linears, sibling groups, smoothing edges."""
