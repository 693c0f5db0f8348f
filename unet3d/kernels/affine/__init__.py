"""Sampling of a rotated, scaled or mirrored patch; nothing is imported here."""
