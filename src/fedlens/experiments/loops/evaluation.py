"""The three ways a run may look at its model: validation, the test curve, the final test.

Only `validation` returns numbers during training; the test curve is written to its journal, and
the final test needs the choice to have been made.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedlens.data.examples import Examples
from fedlens.data.images import Images
from fedlens.data.splits import Choice
from fedlens.experiments.build import Experiment
from fedlens.models.classifier import Classifier
from fedlens.runtime.progress import progress_bar
from fedlens.runtime.stop import StopRequest
from fedlens.training.evaluate import Evaluation, evaluate
from fedlens.training.step import Model

FEW = 32  # images that show whether a model's loss is finite
LARGEST_LOGIT = 1e4  # in absolute value, of a model that remote clients may have spoiled

Sink = Callable[[Mapping[str, float]], None]


class Evaluator:
    def __init__(
        self,
        model: Model,
        experiment: Experiment,
        *,
        batch_size: int,
        stop: StopRequest,
        bounded: bool = False,
    ) -> None:
        """`bounded` limits logits, so that a model which overflows on some images has a loss."""
        self.model = model
        self.bounded = bounded
        self.experiment = experiment
        self.batch_size = batch_size
        self.stop = stop

    def validation(self) -> Evaluation | None:
        examples = self.experiment.validation
        return None if examples is None else self._evaluate("validation", examples)

    def before_training(self) -> Evaluation | None:
        """As `validation`, of a model not trained yet: computed features save a forward pass."""
        features = self.experiment.features
        if not features.computed or self.experiment.validation is None:
            return self.validation()
        head = Classifier(nn.Identity(), self.experiment.model.head)
        return self._evaluate("validation", features.validation, head)

    def has_finite_loss(self) -> bool:
        """On a few validation images, where there are any."""
        examples = self.experiment.validation
        if examples is None:
            return True
        index = torch.arange(min(FEW, len(examples)))
        with torch.inference_mode(), self.experiment.precision.autocast():
            logits = self.model(examples.batch(index)).float()
        labels = examples.labels[index].to(logits.device)
        return math.isfinite(cross_entropy(logits, labels).item())

    def test_curve(self, sink: Sink) -> Callable[[int], None]:
        """`record(unit)` evaluates on test, sends the scalars to the sink, and returns nothing."""
        prepared: list[Examples] = []

        def scalars(images: Images, unit: int) -> dict[str, float]:
            if not prepared:
                prepared.append(self.experiment.test_examples(images))
            return {"unit": unit, **self._evaluate("test curve", prepared[0]).metrics()}

        return self.experiment.test.curve(scalars, sink)

    def test(self, choice: Choice) -> Evaluation:
        return self._evaluate(
            "test", self.experiment.test_examples(self.experiment.test.open(choice))
        )

    def _evaluate(self, title: str, examples: Examples, model: Model | None = None) -> Evaluation:
        model = model or self.model
        with progress_bar(title, self.stop) as progress:
            return evaluate(
                _bounded(model) if self.bounded else model,
                examples,
                classes=self.experiment.classes,
                batch_size=self.batch_size,
                precision=self.experiment.precision,
                progress=progress,
            )


def _bounded(model: Model) -> Model:
    """The model with logits of at most LARGEST_LOGIT, and 0 where they are not numbers."""

    def logits(inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs).float().nan_to_num(0.0).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)

    return logits
