"""Adapters to what runs many servers: events of the KV cache, Ray Serve."""
