"""Which weights to train: sensitivity, masks, and the optimizer that keeps to them."""
