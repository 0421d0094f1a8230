"""The local step, evaluation and schedules."""
