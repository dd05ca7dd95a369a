"""Reports of finished runs as pages: read and checked, turned into sections, drawn, written."""
