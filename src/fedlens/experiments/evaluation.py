"""The three ways a run may look at its model: validation, the test curve, the final test.

Only `validation` hands numbers back while training goes on; the curve goes straight to its journal,
and the final test needs the choice to have been made.
"""

from collections.abc import Callable, Mapping

from torch import nn

from fedlens.data.images import Examples, Images
from fedlens.data.splits import Choice
from fedlens.experiments.build import Parts
from fedlens.models.classifier import Classifier
from fedlens.runtime.progress import bar
from fedlens.runtime.stop import StopRequest
from fedlens.training.evaluate import Evaluation, evaluate
from fedlens.training.step import Model

Sink = Callable[[Mapping[str, float]], None]


class Measure:
    def __init__(self, model: Model, parts: Parts, *, batch_size: int, stop: StopRequest) -> None:
        self.model = model
        self.parts = parts
        self.batch_size = batch_size
        self.stop = stop

    def validation(self) -> Evaluation | None:
        examples = self.parts.validation
        return None if examples is None else self._evaluate("validation", examples)

    def before_training(self) -> Evaluation | None:
        """As `validation`, of a model not trained yet: features that are at hand save a pass."""
        found = self.parts.untouched
        if found is None:
            return self.validation()
        head = Classifier(nn.Identity(), self.parts.model.head)
        return self._evaluate("validation", found, head)

    def test_curve(self, sink: Sink) -> Callable[[int], None]:
        """`record(unit)` evaluates on test, sends the scalars to the sink, and returns nothing."""
        prepared: list[Examples] = []

        def scalars(images: Images, unit: int) -> dict[str, float]:
            if not prepared:
                prepared.append(self.parts.test_examples(images))
            return {"unit": unit, **self._evaluate("test curve", prepared[0]).metrics()}

        return self.parts.test.curve(scalars, sink)

    def test(self, choice: Choice) -> Evaluation:
        return self._evaluate("test", self.parts.test_examples(self.parts.test.open(choice)))

    def _evaluate(self, title: str, examples: Examples, model: Model | None = None) -> Evaluation:
        with bar(title, self.stop) as progress:
            return evaluate(
                model or self.model,
                examples,
                classes=self.parts.classes,
                batch_size=self.batch_size,
                precision=self.parts.precision,
                progress=progress,
            )
