"""Which parameters of a backbone are trained, and what is added to train instead."""
