"""Patches: cut, augmented and batched for training."""
