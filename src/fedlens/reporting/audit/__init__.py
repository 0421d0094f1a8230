"""Checks that a study's records agree with each other and that nothing was chosen on test data."""
