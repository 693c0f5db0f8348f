"""What a run leaves on the disk."""
