"""Which client holds which images."""
