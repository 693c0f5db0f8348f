"""What a training consists of, how much memory it needs and how it is divided, before it starts."""
