"""A conversation in the terminal: what was said, what may be commanded, and the engine that answers. No torch."""
