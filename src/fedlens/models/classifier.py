"""A classifier is a backbone and a linear head: logits = head(keep ⊙ backbone(x))."""

import torch
from torch import nn


class Classifier(nn.Module):
    """A backbone with a head; on cached features the backbone is `nn.Identity`."""

    def __init__(self, backbone: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, inputs: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """`keep` is the dropout mask before the head, already scaled.

        The caller draws it, so that it can be reproduced and split into micro-batches.
        """
        features: torch.Tensor = self.backbone(inputs)
        if keep is not None:
            features = features * keep
        logits: torch.Tensor = self.head(features)
        return logits
