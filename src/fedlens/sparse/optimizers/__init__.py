"""Optimizers that change only the entries a mask chooses, and keep state for these alone."""
