"""Steps with time limits, of which a summary is written as they end."""
