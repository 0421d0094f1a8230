"""Hyper-parameter search: search spaces, trials, studies."""
