"""What a checkpoint needs and what fits, from its headers: nothing is loaded."""
