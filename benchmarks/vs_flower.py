"""Federated rounds: fedlens against Flower's simulation engine (Ray backend, message API).

Both train the same model from the same weights on the same batches of the same cohorts, 10 of 100
clients with 4 steps of SGD each; see peers/workload.py. Run: python benchmarks/vs_flower.py
"""

from peers.contest import contest

MIN_RATIOS = {"cnn": 2.0, "vit": 2.0}

if __name__ == "__main__":
    contest("flower", MIN_RATIOS)
