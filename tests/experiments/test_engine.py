import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fedlens import params
from fedlens.config.schema import Config, EngineConfig, FederatedConfig
from fedlens.data.examples import FeatureExamples
from fedlens.data.images import Images
from fedlens.data.partition import Partition
from fedlens.data.splits import SealedTest
from fedlens.experiments import engine
from fedlens.experiments.build import Parts
from fedlens.experiments.engine import choose_engine
from fedlens.federated.engines.parallel import Parallel
from fedlens.federated.engines.serial import Engine, Serial
from fedlens.federated.engines.vectorised import Vectorised
from fedlens.models.classifier import Classifier
from fedlens.runtime.threads import available, limited_threads
from fedlens.training.precision import Precision


class Plain:
    """Features that do not say they are: only one by one can clients train on them."""

    def __init__(self, inner: FeatureExamples) -> None:
        self.inner = inner
        self.labels = inner.labels

    def __len__(self) -> int:
        return len(self.inner)

    def to(self, device: torch.device) -> "Plain":
        return Plain(self.inner.to(device))

    def batch(self, index: torch.Tensor, draw: torch.Generator | None = None) -> torch.Tensor:
        return self.inner.batch(index, draw)


def no_images() -> Images:
    raise AssertionError("the test split is nobody's business here")


def parts(*, features: bool, dtype: torch.dtype | None = None, trains: bool = True) -> Parts:
    known = FeatureExamples(torch.randn(12, 4), torch.arange(12) % 3)
    head = nn.Linear(4, 3).requires_grad_(trains)
    return Parts(
        model=Classifier(nn.Identity(), head),
        train=known if features else Plain(known),
        partition=Partition(torch.arange(12), torch.tensor([0, 4, 8, 12])),
        held_classes=torch.full((3, 2), 2),
        validation=None,
        test=SealedTest(no_images),
        test_examples=lambda images: known,
        classes=3,
        precision=Precision("fp32" if dtype is None else "amp", "cpu", dtype),
        prepared=False,
        inputs={},
        facts={},
    )


def config(**told: object) -> Config:
    federated = FederatedConfig(clients=3, participation=1, local_steps=2)
    return Config(federated=federated, engine=EngineConfig(**told))  # type: ignore[arg-type]


@pytest.fixture
def chosen() -> Iterator[list[Engine]]:
    opened: list[Engine] = []
    yield opened
    for one in opened:
        one.close()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with limited_threads(1):
        yield


@pytest.mark.parametrize(
    ("told", "given", "kind", "name"),
    [
        ({}, {"features": False}, Serial, "serial"),
        ({}, {"features": True}, Vectorised, "serial"),
        ({"vectorise": False}, {"features": True}, Serial, "serial"),
        ({}, {"features": True, "dtype": torch.bfloat16}, Serial, "serial"),
        ({"name": "auto"}, {"features": True}, Vectorised, "serial"),
        ({"name": "parallel", "workers": 1}, {"features": True}, Parallel, "parallel"),
        ({"name": "parallel", "workers": 1}, {"features": False}, Parallel, "parallel"),
        ({"name": "auto"}, {"features": False, "trains": False}, Serial, "serial"),
    ],
)
def test_the_engine_is_as_told_and_the_config_gives_it_again(
    told: dict[str, object],
    given: dict[str, object],
    kind: type,
    name: str,
    chosen: list[Engine],
) -> None:
    world = parts(**given)  # type: ignore[arg-type]
    for settings in (told, None):
        if settings is not None:
            asked = config(**settings)
        found, settled = choose_engine(asked, world)
        chosen.append(found)
        assert type(found) is kind
        assert (settled.name, settled.threads_per_client) == (name, 1)
        asked = Config(federated=asked.federated, engine=settled)


@pytest.mark.parametrize(("worth", "kind"), [(0.0, Parallel), (1e9, Serial)])
def test_auto_measures_says_so_and_leaves_the_model_alone(
    worth: float,
    kind: type,
    chosen: list[Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine, "WORTH", worth)
    world = parts(features=False)
    before = params.digest(dict(world.model.named_parameters()))
    with caplog.at_level(logging.INFO):
        found, settled = choose_engine(config(name="auto", workers=2), world)
    chosen.append(found)
    assert type(found) is kind
    assert settled.name == kind.__name__.lower()
    assert "2 workers with 1 thread(s) each are" in caplog.text
    assert caplog.text.rstrip().endswith(settled.name)
    assert params.digest(dict(world.model.named_parameters())) == before


def test_threads_of_serial_clients_are_those_of_the_run_and_kept(chosen: list[Engine]) -> None:
    torch.set_num_threads(2)
    found, settled = choose_engine(config(), parts(features=False))
    assert isinstance(found, Serial)
    assert (found.threads, settled.threads_per_client) == (2, 2)
    found, settled = choose_engine(config(threads_per_client=1), parts(features=False))
    assert isinstance(found, Serial)
    assert (found.threads, settled.threads_per_client) == (1, 1)


def test_workers_are_as_many_as_the_scheduler_and_torch_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(6)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(4)), raising=False)
    assert available() == 4
    torch.set_num_threads(3)
    assert available() == 3
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert available() == 1
