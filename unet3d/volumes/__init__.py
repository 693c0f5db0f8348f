"""Volumes: files, data sets, preparation, patches, and the built-in phantom data."""
