"""Flower's processes: SuperLink, SuperNodes, certificates, submitted runs."""
