"""How skewed a partition is, for the records: sizes, classes, entropy and distance of labels.

With p_k the label distribution of client k and p the global one: classes |{c : p_kc > 0}|,
entropy H_k = −Σ_c p_kc log p_kc, distance EMD_k = ½ Σ_c |p_kc − p_c|.
"""

from typing import Any

import torch

from fedlens.data.partitions.partition import Partition

LISTED = 1000  # with more clients a record has only the summary


def histogram(partition: Partition, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """int64 [K, C]: how many samples of each class each client holds."""
    clients = len(partition)
    holder = torch.arange(clients).repeat_interleave(partition.sizes)
    cells = holder * classes + labels[partition.order]
    return torch.bincount(cells, minlength=clients * classes).view(clients, classes)


def statistics(histogram: torch.Tensor) -> dict[str, Any]:
    """For JSON: a list over clients and {min, mean, max} of each measure; no client is empty.

    Entropy is in nats. The earth mover's distance, in [0, 1], has unit cost between any two
    classes; Zhao et al., 2018, https://arxiv.org/abs/1806.00582, report the L1 norm, twice as much.
    With more than 1000 clients only the summary is given.
    """
    counts = histogram.double()
    sizes = histogram.sum(1)
    distribution = counts / counts.sum(1, keepdim=True)
    measures = {
        "sizes": sizes,
        "classes_per_client": (histogram > 0).sum(1),
        "label_entropy": torch.special.entr(distribution).sum(1),
        "emd": (distribution - counts.sum(0) / counts.sum()).abs().sum(1) / 2,
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
