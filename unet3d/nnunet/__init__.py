"""nnU-Net's trained models: read as checkpoints of ours, and ours written as such models."""
