"""Reads untrusted files within limits, validates their content, and shows it safely in messages."""
