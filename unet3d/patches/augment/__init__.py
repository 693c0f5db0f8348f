"""Augmentation: drawn on the host, from the patch's own generator; applied on any device."""
