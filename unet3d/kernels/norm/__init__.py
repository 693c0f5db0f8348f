"""Instance normalisation with its activation; nothing is imported here."""
