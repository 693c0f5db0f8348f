"""The first convolution with the normalisation behind it; nothing is imported here."""
