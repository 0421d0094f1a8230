"""Figures of runs, studies and analyses, as matplotlib draws them."""
