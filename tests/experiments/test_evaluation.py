from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fedlens.data.examples import FeatureExamples
from fedlens.experiments.evaluation import Measure
from fedlens.models.classifier import Classifier
from fedlens.runtime.stop import StopRequest
from fedlens.training.precision import Precision


class Counted(nn.Module):
    """A backbone that knows how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.linear(inputs)
        return found


@pytest.fixture
def parts() -> Any:
    torch.manual_seed(0)
    backbone, inputs, labels = Counted(), torch.randn(20, 6), torch.arange(20) % 3
    with torch.no_grad():
        seen = backbone.linear(inputs)
    return SimpleNamespace(
        model=Classifier(backbone, nn.Linear(4, 3)),
        validation=FeatureExamples(inputs, labels),
        untouched=FeatureExamples(seen, labels),
        classes=3,
        precision=Precision("fp32", "cpu"),
    )


def test_before_training_the_features_at_hand_say_what_a_pass_of_the_backbone_would(
    parts: Any,
) -> None:
    measure = Measure(parts.model, parts, batch_size=8, stop=StopRequest())
    found = measure.before_training()
    assert parts.model.backbone.calls == 0
    expected = measure.validation()
    assert parts.model.backbone.calls == 3
    assert found is not None
    assert expected is not None
    assert found.metrics() == pytest.approx(expected.metrics(), rel=1e-6)
    assert found.per_class == expected.per_class


def test_without_features_the_backbone_is_asked(parts: Any) -> None:
    parts.untouched = None
    measure = Measure(parts.model, parts, batch_size=8, stop=StopRequest())
    assert measure.before_training() == measure.validation()
