"""Experiments whose clients are reached through Flower."""
