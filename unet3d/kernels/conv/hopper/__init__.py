"""3x3x3 convolutions of 32 and 64 channels, written by hand for NVIDIA's Hopper GPUs."""
