"""Configs: schema, checks, composition from YAML presets, run names, labels."""
