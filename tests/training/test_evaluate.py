import pytest
import torch
import torch.nn.functional as F

from fedlens.data.examples import FeatureExamples
from fedlens.rng import generator
from fedlens.training.evaluate import evaluate
from fedlens.training.precision import Precision

FP32 = Precision("fp32", "cpu")


def test_by_hand() -> None:
    logits = torch.tensor([[3.0, 1, 2], [0, 2, 1], [0, 1, 2], [5, 4, 0]])
    examples = FeatureExamples(logits, torch.tensor([0, 1, 0, 1]))
    found = evaluate(lambda x: x, examples, classes=3, batch_size=3, precision=FP32)
    assert found.top1 == 0.5
    assert found.top5 == 1.0  # three classes: the top three hold all
    assert found.per_class == [0.5, 0.5, None]
    assert found.count == 4
    assert found.loss == pytest.approx(float(F.cross_entropy(logits, examples.labels)))


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_against_the_obvious(batch_size: int) -> None:
    draw = generator(0, "test")
    logits = torch.randn(50, 20, generator=draw)
    labels = torch.randint(20, (50,), generator=draw)
    calls = []
    found = evaluate(
        lambda x: x, FeatureExamples(logits, labels), classes=20, batch_size=batch_size,
        precision=FP32, progress=lambda done, total: calls.append((done, total)),
    )  # fmt: skip
    ranked = logits.argsort(1, descending=True)
    assert found.top1 == pytest.approx(float((ranked[:, 0] == labels).float().mean()))
    hits = [int(labels[i]) in ranked[i, :5].tolist() for i in range(50)]
    assert found.top5 == pytest.approx(sum(hits) / 50)
    for c, accuracy in enumerate(found.per_class):
        of_class = ranked[labels == c, 0] == c
        expected = float(of_class.float().mean()) if len(of_class) else None
        assert accuracy == (None if expected is None else pytest.approx(expected))
    assert calls[-1] == (50, 50)
