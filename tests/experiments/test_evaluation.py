import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fedlens.data.examples import FeatureExamples
from fedlens.experiments.loops.evaluation import Evaluator
from fedlens.models.classifier import Classifier
from fedlens.runtime.stop import StopRequest
from fedlens.training.evaluate import NotFinite
from fedlens.training.precision import Precision


class Counted(nn.Module):
    """A backbone that counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        features: torch.Tensor = self.linear(inputs)
        return features


@pytest.fixture
def experiment() -> Any:
    torch.manual_seed(0)
    backbone, inputs, labels = Counted(), torch.randn(20, 6), torch.arange(20) % 3
    with torch.no_grad():
        features = backbone.linear(inputs)
    return SimpleNamespace(
        model=Classifier(backbone, nn.Linear(4, 3)),
        validation=FeatureExamples(inputs, labels),
        features=SimpleNamespace(computed=True, validation=FeatureExamples(features, labels)),
        classes=3,
        precision=Precision("fp32", "cpu"),
    )


def test_before_training_computed_features_replace_a_pass_of_the_backbone(
    experiment: Any,
) -> None:
    evaluator = Evaluator(experiment.model, experiment, batch_size=8, stop=StopRequest())
    evaluation = evaluator.before_training()
    assert experiment.model.backbone.calls == 0
    expected = evaluator.validation()
    assert experiment.model.backbone.calls == 3
    assert evaluation is not None
    assert expected is not None
    assert evaluation.metrics() == pytest.approx(expected.metrics(), rel=1e-6)
    assert evaluation.per_class == expected.per_class


def test_without_computed_features_the_backbone_runs(experiment: Any) -> None:
    experiment.features.computed = False
    evaluator = Evaluator(experiment.model, experiment, batch_size=8, stop=StopRequest())
    assert evaluator.before_training() == evaluator.validation()


def test_a_model_that_overflows_on_some_images_has_an_accuracy_if_its_logits_are_bounded(
    experiment: Any,
) -> None:
    validation = experiment.validation

    def evaluator(*, bounded: bool) -> Evaluator:
        return Evaluator(
            experiment.model, experiment, batch_size=8, stop=StopRequest(), bounded=bounded
        )

    assert evaluator(bounded=True).validation() == evaluator(bounded=False).validation()
    spoiled = validation.features.clone()
    spoiled[0], spoiled[1] = math.inf, math.nan
    experiment.validation = FeatureExamples(spoiled, validation.labels)
    with pytest.raises(NotFinite):
        evaluator(bounded=False).validation()
    found = evaluator(bounded=True).validation()
    assert found is not None
    assert math.isfinite(found.loss)
    experiment.validation = FeatureExamples(validation.features[2:], validation.labels[2:])
    others = evaluator(bounded=False).validation()
    assert others is not None
    assert 18 * others.top1 <= 20 * found.top1 <= 18 * others.top1 + 2
