"""Federated rounds: fedlens against Apple's pfl-research (SimulatedBackend).

Both train the same model from the same weights on the same batches of the same cohorts, 10 of 100
clients with 4 steps of SGD each; see peers/workload.py. Run: python benchmarks/vs_pfl.py
"""

from peers.contest import contest

MIN_RATIOS = {"cnn": 1.3, "vit": 1.3}

if __name__ == "__main__":
    contest("pfl", MIN_RATIOS)
