"""Images: what a file holds, as a lazy array with a geometry."""
