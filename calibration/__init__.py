"""Calibration: from text to token sequences, and statistics of layer inputs."""
