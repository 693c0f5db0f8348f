"""What a training will be, need and take, before it starts."""
