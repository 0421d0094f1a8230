"""Private runs through Flower's apps: what is protected, what is counted, what stays unsaid."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedlens[flower]'")

from fedlens.config.compose import compose
from fedlens.config.schema import Config
from fedlens.errors import FedlensError
from fedlens.experiments.flower import apps
from fedlens.experiments.flower.clients import SERVER_SHARD
from fedlens.experiments.local_data import deal
from fedlens.experiments.run import start
from fedlens.federated.flower.secure_aggregation import SecureSettings, largest_error
from fedlens.store.checkpoints import Checkpoints
from fedlens.store.run_folder import RunFolder
from tests.federated.flower.inprocess import InProcessGrid
from tests.integration.conftest import FEDERATED, ON_FEATURES, TINY, Call

CLIENTS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node for every client."""
    made = tmp_path_factory.mktemp("federation")
    deal(config(made), made, CLIENTS)
    return made


def config(root: Path, *words: str, engine: str = "flower") -> Config:
    told = [*TINY, *FEDERATED, *ON_FEATURES, "federated.rounds=2", "engine.vectorise=false"]
    return compose(
        "quickstart_fedavg", [*told, *words, f"run.root={root}", f"engine.name={engine}"]
    )


@pytest.fixture
def privately(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*words: str) -> tuple[RunFolder, list[dict[str, Any]]]:
        monkeypatch.setenv(SERVER_SHARD, str(folder / "server"))
        shards = {100 + i: {apps.SHARD: str(folder / f"node-{i}")} for i in range(CLIENTS)}
        grid = InProcessGrid(apps.client, shards)  # type: ignore[arg-type]
        found = start(config(tmp_path / "runs", *words), grid=grid)
        return found, list(found.journal("metrics").read())

    apps._deployed.cache_clear()
    apps._shard.cache_clear()
    return run


def test_central_privacy_clips_every_client_and_counts_epsilon(privately: Any) -> None:
    found, rounds = privately(
        "privacy.name=central", "privacy.clip_norm=0.01", "privacy.delta=0.01"
    )
    assert all(norm <= 0.01 + 1e-6 for record in rounds for norm in record["update_norms"])
    spent = found.result["privacy"]
    assert spent["kind"] == "central"
    assert 0 < spent["epsilon_secret_cohorts"] <= spent["epsilon"]


def test_local_privacy_keeps_losses_at_home(privately: Any) -> None:
    found, rounds = privately("privacy.name=local", "privacy.clip_norm=0.001")
    assert not any("train" in record or "client_losses" in record for record in rounds)
    assert all(norm > 0.001 for record in rounds for norm in record["update_norms"])  # noise
    assert found.result["privacy"]["epsilon"] > 0


def test_secure_sums_are_those_of_bare_updates_but_for_rounding(
    privately: Any, tmp_path: Path
) -> None:
    plain = ["train.momentum=0", "federated.local_steps=4", "federated.rounds=3"]
    plain += ["checkpoint.every=1", "checkpoint.keep_last=3"]
    bare = start(config(tmp_path / "bare", *plain, engine="serial"))
    found, rounds = privately(*plain, "privacy.secure=true", "privacy.reach=0.1")
    first, _, expected = trained(bare)
    # A round's sum misses by at most this in each of d values, so by √d times as much in length.
    # The next round begins there. Gradient steps on a convex loss, small enough and without
    # momentum, lead no two starts further apart: after R rounds it is R times as much.
    missed = largest_error(SecureSettings(reach=0.1), [72] * 3, 72)
    bound = len(rounds) * missed * math.sqrt(len(expected))
    assert torch.dist(trained(found)[-1], expected) <= bound
    assert torch.dist(first, expected) > 1000 * bound  # what was learned is far more than that
    assert not any("update_norms" in record or "drift" in record for record in rounds)
    assert "privacy" not in found.result  # a sum without noise has no ε


def trained(run: RunFolder) -> list[torch.Tensor]:
    """The head after every round, each as one vector."""
    kept = Checkpoints(run.checkpoints)
    heads = [kept.load(name).tensors for name in kept.names()]
    return [torch.cat([head[name].flatten() for name in sorted(head)]) for head in heads]


def test_a_run_whose_updates_all_reach_too_far_ends_and_says_so(privately: Any) -> None:
    with pytest.raises(FedlensError, match=r"privacy\.reach"):
        privately("privacy.secure=true", "privacy.reach=1e-7")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["privacy.name=central"], "privacy goes through Flower"),
        (["privacy.name=secret"], "privacy.name=secret is unknown"),
        (["engine=flower", "privacy.name=local", "privacy.epsilon=2"], "between 0 and 1"),
        (
            ["engine=flower", "privacy.secure=true", "algorithm.aggregator=median"],
            "means of updates",
        ),
        (["engine=flower", "privacy.name=local", "algorithm.scaffold=true"], "SCAFFOLD"),
        (["engine=flower", "privacy.name=central", "head=trained"], "head=trained"),
        (["engine=flower", "privacy.secure=true", "federated.keep_updates=1"], "keep_updates"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_sentence(
    words: list[str], complaint: str, fedlens: Call
) -> None:
    code, _, said = fedlens("run", "quickstart_fedavg", *words)
    assert code == 2
    assert complaint in said


def test_a_superlink_that_is_not_there_is_a_sentence(fedlens: Call, tmp_path: Path) -> None:
    nowhere = f"engine.federation={tmp_path / 'nowhere'}"
    code, _, said = fedlens("run", "quickstart_fedavg", "engine=flower", nowhere)
    assert code == 2
    assert "fedlens flower up" in said
