"""Plans of training runs: data, network, memory and placement, before training starts."""
