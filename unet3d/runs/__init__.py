"""The folder of a run, and the checkpoints in it."""
