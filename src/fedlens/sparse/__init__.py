"""Which weights to train: sensitivity, masks, and optimizers that train masked weights only."""
