"""The architectures that are read and written; those that are alike share a file, which registers them."""
