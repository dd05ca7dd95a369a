"""Bodies of requests: what several routes share."""
