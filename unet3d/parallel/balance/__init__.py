"""Where to cut the block list so that all stages take equal time or equal memory."""
