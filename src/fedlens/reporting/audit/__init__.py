"""Checks that a study's records agree, and that nothing was chosen on test data."""
