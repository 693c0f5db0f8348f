"""Volumes: files, data sets, preparation, patches, and the phantom data."""
