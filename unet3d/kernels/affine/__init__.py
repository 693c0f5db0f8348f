"""Sampling of a turned, scaled or mirrored patch; nothing is imported here."""
