"""Preparation: from an image to what a network takes."""
