"""How far a partition is from even: who holds how much of what, as numbers for the records.

With p_k the label law of client k and p the global one: size n_k, classes |{c : p_kc > 0}|,
entropy H_k = −Σ_c p_kc log p_kc, and distance EMD_k = ½ Σ_c |p_kc − p_c|.
"""

from typing import Any

import torch

from fedlens.data.partition import Partition

LISTED = 1000  # above so many clients a record keeps the summary alone


def histogram(partition: Partition, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """int64 [K, C]: how many samples of each class each client holds."""
    clients = len(partition)
    holder = torch.arange(clients).repeat_interleave(partition.sizes)
    cells = holder * classes + labels[partition.order]
    return torch.bincount(cells, minlength=clients * classes).view(clients, classes)


def statistics(histogram: torch.Tensor) -> dict[str, Any]:
    """JSON-ready: a list over clients and {min, mean, max} of each measure; no client is empty.

    Entropy is in nats. The earth mover's distance, in [0, 1], has unit cost between any two
    classes; Zhao et al., 2018, https://arxiv.org/abs/1806.00582, report the L1 norm, twice as much.
    Above 1000 clients the lists are left out and the summary stays.
    """
    counts = histogram.double()
    sizes = histogram.sum(1)
    law = counts / counts.sum(1, keepdim=True)
    measures = {
        "sizes": sizes,
        "classes_per_client": (histogram > 0).sum(1),
        "label_entropy": torch.special.entr(law).sum(1),
        "emd": (law - counts.sum(0) / counts.sum()).abs().sum(1) / 2,
    }
    lists = {name: values.tolist() for name, values in measures.items()}
    summary = {
        name: {
            "min": values.min().item(),
            "mean": values.double().mean().item(),
            "max": values.max().item(),
        }
        for name, values in measures.items()
    }
    return {
        "clients": len(histogram),
        "samples": int(sizes.sum()),
        **(lists if len(histogram) <= LISTED else {}),
        "summary": summary,
    }
