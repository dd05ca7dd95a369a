"""Compression run: plans every tensor, then processes one block at a time, resumably."""
