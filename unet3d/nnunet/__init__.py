"""nnU-Net's models are read as checkpoints, and checkpoints are written as such models."""
