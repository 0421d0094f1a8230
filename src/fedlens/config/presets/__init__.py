"""Hydra YAML, one folder per group."""
