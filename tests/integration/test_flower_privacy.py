"""Private runs through Flower's apps: clipping, noise, ε, and losses that are not revealed."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedlens[flower]'")

from fedlens.config.compose import compose
from fedlens.config.schema import Config
from fedlens.errors import FedlensError
from fedlens.experiments.flower import SERVER_SHARD, apps
from fedlens.experiments.preparation.local_data import write_shards
from fedlens.experiments.run import start
from fedlens.federated.flower.secure_aggregation import SecureSettings, max_rounding_error
from fedlens.store.checkpoints import Checkpoints
from fedlens.store.run_folder import RunFolder
from tests.federated.flower.inprocess import InProcessGrid
from tests.integration.conftest import FEDERATED, ON_FEATURES, TINY, Call

CLIENTS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node for every client."""
    federation = tmp_path_factory.mktemp("federation")
    write_shards(config(federation), federation, CLIENTS)
    return federation


def config(root: Path, *overrides: str, engine: str = "flower") -> Config:
    engines = [f"engine={engine}", "engine.vectorise=false"]
    small = [*TINY, *FEDERATED, *ON_FEATURES, "federated.rounds=2"]
    return compose("quickstart_fedavg", [*small, *engines, *overrides, f"run.root={root}"])


@pytest.fixture
def privately(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*overrides: str) -> tuple[RunFolder, list[dict[str, Any]]]:
        monkeypatch.setenv(SERVER_SHARD, str(folder / "server"))
        shards = {100 + i: {apps.SHARD: str(folder / f"node-{i}")} for i in range(CLIENTS)}
        grid = InProcessGrid(apps.client, shards)  # type: ignore[arg-type]
        finished = start(config(tmp_path / "runs", *overrides), grid=grid)
        return finished, list(finished.journal("metrics").read())

    apps._session.cache_clear()
    apps._shard.cache_clear()
    return run


def test_central_privacy_clips_every_client_and_counts_epsilon(privately: Any) -> None:
    run, rounds = privately("privacy.name=central", "privacy.clip_norm=0.01", "privacy.delta=0.01")
    assert all(norm <= 0.01 + 1e-6 for record in rounds for norm in record["update_norms"])
    spent = run.result["privacy"]
    assert spent["kind"] == "central"
    assert 0 < spent["epsilon_secret_cohorts"] <= spent["epsilon"]


def test_local_privacy_does_not_reveal_losses(privately: Any) -> None:
    run, rounds = privately("privacy.name=local", "privacy.clip_norm=0.001")
    assert not any("train" in record or "client_losses" in record for record in rounds)
    assert all(norm > 0.001 for record in rounds for norm in record["update_norms"])  # noise
    assert run.result["privacy"]["epsilon"] > 0


def test_secure_sums_equal_plain_sums_up_to_rounding(privately: Any, tmp_path: Path) -> None:
    plain = ["train.optimizer.momentum=0", "federated.local_steps=4", "federated.rounds=3"]
    plain += ["checkpoint.every=1", "checkpoint.keep_last=3"]
    bare = start(config(tmp_path / "bare", *plain, engine="serial"))
    run, rounds = privately(*plain, "privacy.secure=true", "privacy.max_update_value=0.1")
    first, _, expected = trained(bare)
    # A round's sum has at most this error in each of d values, so √d times as much in norm. The
    # next round starts from there. Small gradient steps on a convex loss without momentum do not
    # increase the distance between two starts: after R rounds it is at most R times as much.
    error = max_rounding_error(SecureSettings(max_update_value=0.1), [72] * 3, 72)
    bound = len(rounds) * error * math.sqrt(len(expected))
    assert torch.dist(trained(run)[-1], expected) <= bound
    assert torch.dist(first, expected) > 1000 * bound  # what was learned is far more than that
    assert not any("update_norms" in record or "drift" in record for record in rounds)
    assert "privacy" not in run.result  # a sum without noise has no ε


def trained(run: RunFolder) -> list[torch.Tensor]:
    """The head after every round, each as one vector."""
    kept = Checkpoints(run.checkpoints)
    heads = [kept.load(name).tensors for name in kept.names()]
    return [torch.cat([head[name].flatten() for name in sorted(head)]) for head in heads]


def test_a_run_whose_updates_are_all_too_large_ends_and_says_so(privately: Any) -> None:
    with pytest.raises(FedlensError, match="max_update_value"):
        privately("privacy.secure=true", "privacy.max_update_value=1e-7")


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["privacy.name=central"], "privacy goes through Flower"),
        (["privacy.name=secret"], "privacy.name=secret is unknown"),
        (["engine=flower", "privacy.name=local", "privacy.epsilon=2"], "must be in (0, 1)"),
        (
            ["engine=flower", "privacy.secure=true", "algorithm.aggregator=median"],
            "need a mean of updates",
        ),
        (["engine=flower", "privacy.name=local", "algorithm.scaffold=true"], "SCAFFOLD"),
        (["engine=flower", "privacy.name=central", "head=trained"], "head=trained"),
        (["engine=flower", "privacy.secure=true", "federated.keep_updates=1"], "keep_updates"),
    ],
)
def test_incompatible_settings_are_refused_in_a_sentence(
    overrides: list[str], complaint: str, fedlens: Call
) -> None:
    code, _, err = fedlens("run", "quickstart_fedavg", *overrides)
    assert code == 2
    assert complaint in err


def test_a_missing_superlink_is_reported_in_a_sentence(fedlens: Call, tmp_path: Path) -> None:
    nowhere = f"engine.federation={tmp_path / 'nowhere'}"
    code, _, err = fedlens("run", "quickstart_fedavg", "engine=flower", nowhere)
    assert code == 2
    assert "fedlens flower up" in err
