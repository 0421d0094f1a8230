"""Hyper-parameter search: spaces, trials, searches."""
