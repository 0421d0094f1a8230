"""Which engine a row makes, and that a run can store and repeat the choice."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedlens import params
from fedlens.data.examples import FeatureExamples
from fedlens.federated.client import LocalTraining, Trainer
from fedlens.federated.engines import remembered, rows
from fedlens.federated.engines.parallel import Parallel
from fedlens.federated.engines.serial import Serial
from fedlens.federated.engines.vectorised import Vectorised
from fedlens.federated.tasks import Engine
from fedlens.models.classifier import Classifier
from fedlens.registry import RowSettings, engine
from fedlens.runtime.threads import available, limited_threads
from fedlens.training.optimizers import AdamW, Sgd
from fedlens.training.precision import Precision
from fedlens.training.step import StepSettings
from tests.federated.small import kept, shards, tasks

CLIENTS = 3


class PlainExamples:
    """Features of another type than FeatureExamples: clients train on them one by one."""

    def __init__(self, inner: FeatureExamples) -> None:
        self.inner = inner
        self.labels = inner.labels

    def __len__(self) -> int:
        return len(self.inner)

    def to(self, device: torch.device) -> "PlainExamples":
        return PlainExamples(self.inner.to(device))

    def batch(self, index: torch.Tensor, draw: torch.Generator | None = None) -> torch.Tensor:
        return self.inner.batch(index, draw)


def trainer(
    *,
    features: bool,
    dtype: torch.dtype | None = None,
    trains: bool = True,
    optimizer: Any = None,
) -> Trainer:
    known = FeatureExamples(torch.randn(12, 4), torch.arange(12) % 3)
    precision = Precision("fp32" if dtype is None else "amp", "cpu", dtype)
    return Trainer(
        Classifier(nn.Identity(), nn.Linear(4, 3).requires_grad_(trains)),
        known if features else PlainExamples(known),
        shards([4, 4, 4]).shard,
        LocalTraining(StepSettings(precision), 4, optimizer or Sgd()),
        seed=0,
    )


@pytest.fixture
def opened() -> Iterator[list[Engine]]:
    engines: list[Engine] = []
    yield engines
    for one in engines:
        one.close()


@pytest.fixture(autouse=True)
def _no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was measured in another test; and each measurement is made once."""
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path))
    monkeypatch.setattr(rows, "PROBES", 1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with limited_threads(1):
        yield


def make(settings: RowSettings, trainer: Trainer) -> Any:
    return engine[settings.name].make(trainer, CLIENTS, **settings.parameters)


@pytest.mark.parametrize(
    ("choice", "training", "kind", "name"),
    [
        ({"name": "serial"}, {"features": False}, Serial, "serial"),
        ({"name": "serial"}, {"features": True}, Vectorised, "serial"),
        ({"name": "serial", "vectorise": False}, {"features": True}, Serial, "serial"),
        ({"name": "serial"}, {"features": True, "dtype": torch.bfloat16}, Serial, "serial"),
        ({"name": "serial"}, {"features": True, "optimizer": AdamW()}, Serial, "serial"),
        ({"name": "auto"}, {"features": True}, Vectorised, "serial"),
        ({"name": "parallel", "workers": 1}, {"features": True}, Parallel, "parallel"),
        ({"name": "parallel", "workers": 1}, {"features": False}, Parallel, "parallel"),
        ({"name": "auto"}, {"features": False, "trains": False}, Serial, "serial"),
        ({"name": "serial", "shortcuts": True}, {"features": False}, Serial, "serial"),
        ({"name": "parallel", "shortcuts": True}, {"features": False}, Parallel, "parallel"),
    ],
)
def test_the_engine_is_the_chosen_one_and_its_settings_make_it_again(
    choice: dict[str, object],
    training: dict[str, Any],
    kind: type,
    name: str,
    opened: list[Engine],
) -> None:
    clients = trainer(**training)
    settings = engine.settings(choice, "engine")
    for _ in range(2):
        made = make(settings, clients)
        opened.append(made)
        assert type(made) is kind
        assert (made.settings.name, made.settings.threads_per_client) == (name, 1)
        assert made.settings == engine.settings(made.settings, "engine")
        settings = made.settings


@pytest.mark.parametrize(("speedup", "kind"), [(0.0, Parallel), (1e9, Serial)])
def test_auto_measures_logs_its_choice_and_leaves_the_model_alone(
    speedup: float,
    kind: type,
    opened: list[Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rows, "MIN_SPEEDUP", speedup)
    clients = trainer(features=False)
    before = params.digest(dict(clients.model.named_parameters()))
    with caplog.at_level(logging.INFO):
        made = make(engine.settings({"name": "auto", "workers": 2}, "engine"), clients)
    opened.append(made)
    assert type(made) is kind
    assert made.settings.name == kind.__name__.lower()
    assert "2 workers with 1 thread(s) each are" in caplog.text
    assert f": {made.settings.name}\n" in caplog.text
    assert params.digest(dict(clients.model.named_parameters())) == before


def test_threads_of_serial_clients_are_those_of_the_run_and_are_stored() -> None:
    torch.set_num_threads(2)
    made = rows.serial(trainer(features=False), CLIENTS)
    assert isinstance(made, Serial)
    assert made.settings is not None
    assert (made.threads, made.settings.threads_per_client) == (2, 2)
    made = rows.serial(trainer(features=False), CLIENTS, threads_per_client=1)
    assert isinstance(made, Serial)
    assert made.settings is not None
    assert (made.threads, made.settings.threads_per_client) == (1, 1)


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


def settings_of(made: Engine) -> RowSettings:
    assert isinstance(made, Serial | Parallel)
    assert made.settings is not None
    return made.settings


@pytest.mark.parametrize("name", ["serial", "parallel"])
def test_shortcuts_give_the_same_updates_up_to_rounding_and_leave_the_model_alone(
    name: str, opened: list[Engine]
) -> None:
    clients = trainer(features=False)
    start = params.copy(clients.packed())
    asked = tasks([4] * CLIENTS, steps=3)
    updates = []
    for shortcuts in (None, True):
        settings = engine.settings({"name": name, "shortcuts": shortcuts}, "engine")
        opened.append(make(settings, clients))
        assert settings_of(opened[-1]).shortcuts is bool(shortcuts)
        updates.append(kept(opened[-1], start, asked))
    assert opened[-1].trainer.fused  # type: ignore[attr-defined]
    assert clients.optimizer is not None
    assert not clients.optimizer.param_groups[0]["fused"]
    for plain, short in zip(*updates, strict=True):
        for tensor, expected in plain.parameters.items():
            torch.testing.assert_close(short.parameters[tensor], expected)
            assert (expected != start[tensor]).any()


@pytest.mark.parametrize(("speedup", "shortcuts"), [(0.0, True), (1e9, False)])
def test_auto_takes_shortcuts_that_are_faster_and_remembers_it(
    speedup: float,
    shortcuts: bool,
    opened: list[Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rows, "MIN_SPEEDUP", 1e9)
    monkeypatch.setattr(rows, "MIN_SHORTCUT", speedup)
    opened.append(rows.auto(trainer(features=False), CLIENTS, workers=1))
    assert settings_of(opened[-1]).shortcuts is shortcuts
    monkeypatch.setattr(rows, "_faster", None)  # nothing is measured again
    caplog.set_level(logging.INFO)
    opened.append(rows.auto(trainer(features=False), CLIENTS, workers=1))
    assert settings_of(opened[-1]) == settings_of(opened[0])
    assert "as measured before" in caplog.text
    with pytest.raises(TypeError):  # another optimizer is other work
        rows.auto(trainer(features=False, optimizer=AdamW()), CLIENTS, workers=1)


@pytest.mark.parametrize("shortcuts", [True, False])
def test_auto_keeps_to_the_shortcuts_that_were_asked_for(
    shortcuts: bool, opened: list[Engine]
) -> None:
    opened.append(rows.auto(trainer(features=False), CLIENTS, workers=1, shortcuts=shortcuts))
    assert settings_of(opened[-1]).shortcuts is shortcuts


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"parallel": 1, "shortcuts": true}'])
def test_a_damaged_memory_is_ignored_and_renewed(
    content: str, opened: list[Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened.append(rows.auto(trainer(features=False), CLIENTS, workers=1))
    [file] = (tmp_path / remembered.FOLDER).glob("*.json")
    whole = remembered.recall(file)
    assert whole is not None
    file.write_text(content)
    opened.append(rows.auto(trainer(features=False), CLIENTS, workers=1))
    assert f"{file} is damaged" in caplog.text
    assert remembered.recall(file) is not None


def test_a_cache_that_cannot_be_written_costs_only_the_memory(
    opened: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "file"))
    opened.append(rows.auto(trainer(features=False), CLIENTS, workers=1))
    assert isinstance(opened[-1], Serial | Parallel)
