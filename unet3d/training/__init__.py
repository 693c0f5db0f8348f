"""Training: choosing and starting a run, its steps, its validations, its state."""
