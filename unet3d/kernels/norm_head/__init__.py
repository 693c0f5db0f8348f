"""Instance normalisation, LeakyReLU and the head behind them; nothing is imported here."""
