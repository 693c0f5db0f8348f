"""Data sets: their layouts, labels and folds, and the built-in phantom data."""
