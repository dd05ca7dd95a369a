"""What a recipe can do to a model: one kind of stage per file, as data."""
