"""Scheduling policy: scheduler, block pool and engine. Free of torch."""
