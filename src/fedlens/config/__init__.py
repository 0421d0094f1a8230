"""What an experiment can be told: schema, checks, composition from YAML presets, run names."""
