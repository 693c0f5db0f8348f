"""The sums of the Dice and cross-entropy loss; nothing is imported here."""
