"""Federated algorithms, one file each: client term, aggregation, server update, paper."""
