"""Models that several processes share (tensor parallelism): the plan of cuts, and what processes tell each other."""
