"""One file for each lineage of model families; importing it registers them."""
