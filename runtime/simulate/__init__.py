"""Simulation of serving: the engine itself over virtual time, whose steps take what they were measured to. No torch."""
