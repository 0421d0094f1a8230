"""Clients, sampling, aggregation and server steps: the parts of a federated round."""
