"""Where to cut the block list, so that every stage takes as long or as much memory."""
