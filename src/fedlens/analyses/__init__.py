"""Analyses of finished runs: the scale α, merging, client algebra, interference."""
