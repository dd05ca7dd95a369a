"""Prefill and decode in separate engines: pages of keys and values move between processes."""
