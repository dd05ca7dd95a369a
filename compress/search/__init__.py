"""Search for the stored form of every layer: sensitivities, allocation for a target, and the recipe."""
