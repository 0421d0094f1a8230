"""Datasets by where they come from: files, archives, folders, other libraries, and a generator."""
