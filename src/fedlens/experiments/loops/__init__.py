"""The loop over epochs or rounds: training, evaluation, checkpoints, the result."""
