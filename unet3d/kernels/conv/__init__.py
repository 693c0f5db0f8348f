"""Convolutions; nothing is imported here."""
