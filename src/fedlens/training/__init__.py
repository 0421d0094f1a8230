"""The training step, evaluation, schedules, precision and client optimizers."""
