"""The compression run: plan what happens to every tensor, then stream one block at a time, resumably."""
