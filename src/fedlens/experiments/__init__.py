"""Config → build → run; records and checkpoints. Importing this package loads no torch."""
