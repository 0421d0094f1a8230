"""Backbones: how they are made, read and named, and where their weights come from."""
