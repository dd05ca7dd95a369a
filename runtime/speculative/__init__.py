"""Guessing the next tokens cheaply, so that the target verifies several in one step."""
