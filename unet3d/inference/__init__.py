"""Segmentation of scans, and its agreement with label maps."""
