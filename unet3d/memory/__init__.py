"""The memory of devices, measured, or predicted with fake tensors.

Nothing is imported here, so the lowest layer can import modules of this package.
"""
