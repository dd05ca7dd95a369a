"""One file for each format of tool calls; importing it registers the format."""
