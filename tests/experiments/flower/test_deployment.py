"""What is told before any process of a federation starts."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedlens[flower]'")

from fedlens.config.compose import compose
from fedlens.config.schema import Config
from fedlens.data.shards import node_name
from fedlens.errors import FedlensError
from fedlens.experiments.flower import apps, deployment
from fedlens.experiments.flower.clients import SERVER_SHARD, opened_crowd
from fedlens.experiments.local_data import deal
from fedlens.federated.flower.deployment.submission import Connection
from fedlens.files import write_json
from fedlens.runtime.stop import Interrupted, StopRequest
from tests.federated.flower.inprocess import InProcessGrid

CLIENTS = 4
CA = Path("certificates") / "ca.crt"
KNOWN = {"address": "lab:1", "root_certificates": str(CA), "insecure": False}


def secure_config(root: Path) -> Config:
    words = [
        *("data=synthetic", "data.train_per_class=4", "data.test_per_class=2"),
        *(f"federated.clients={CLIENTS}", "federated.participation=1.0", "privacy.secure=true"),
        *("engine=flower", f"engine.federation={root}"),
    ]
    return compose("quickstart_fedavg", words)


def test_a_node_connects_as_its_folder_says_but_for_what_is_told(tmp_path: Path) -> None:
    write_json(tmp_path / "superlink.json", KNOWN)
    known = Connection("lab:1", tmp_path / CA)
    assert deployment.connection_of(tmp_path) == known
    assert deployment.connection_of(tmp_path, address="hall:2") == replace(known, address="hall:2")
    other = tmp_path / "other.crt"
    for address in (None, "lab:1"):
        trusting = deployment.connection_of(tmp_path, address=address, root_certificates=other)
        assert trusting == Connection("lab:1", other)
        plain = deployment.connection_of(tmp_path, address=address, insecure=True)
        assert plain == Connection("lab:1", insecure=True)


def test_an_authority_is_trusted_also_where_the_folder_says_insecure(tmp_path: Path) -> None:
    told = {**KNOWN, "root_certificates": None, "insecure": True}
    write_json(tmp_path / "superlink.json", told)
    found = deployment.connection_of(tmp_path, root_certificates=tmp_path / CA)
    assert found == Connection("lab:1", tmp_path / CA)


def test_an_authority_without_tls_is_a_contradiction(tmp_path: Path) -> None:
    with pytest.raises(FedlensError, match="leave --root-certificates out"):
        deployment.connection_of(tmp_path, root_certificates=tmp_path / CA, insecure=True)


def test_a_node_without_its_data_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(FedlensError, match=r"node-0 is not a whole shard \(shard.json is missing"):
        deployment.serve_node(
            tmp_path,
            "node-0",
            Connection("127.0.0.1:1", insecure=True),
            StopRequest(),
            shard=tmp_path / "node-0",
            reconnect=1.0,
        )
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_looks_for_its_superlink_can_be_stopped(tmp_path: Path) -> None:
    deal(secure_config(tmp_path), tmp_path, 1)
    stop = StopRequest()
    stop.name = "SIGINT"
    with pytest.raises(Interrupted):
        deployment.serve_node(
            tmp_path,
            "node-0",
            Connection("127.0.0.1:1", insecure=True),
            stop,
            shard=tmp_path / "node-0",
            reconnect=600.0,
        )


@pytest.mark.parametrize("nodes", [CLIENTS, CLIENTS - 1])
def test_a_secure_run_needs_a_node_for_every_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    config = secure_config(tmp_path)
    deal(config, tmp_path, nodes)
    monkeypatch.setenv(SERVER_SHARD, str(tmp_path / "server"))
    homes = {i: {apps.SHARD: str(tmp_path / node_name(i))} for i in range(nodes)}
    grid = InProcessGrid(apps.client, homes)  # type: ignore[arg-type]
    if nodes == CLIENTS:
        with opened_crowd(config, StopRequest(), grid) as (crowd, _):
            assert crowd is not None
    else:
        with (
            pytest.raises(FedlensError, match=f"fedlens flower partition … --nodes {CLIENTS}`"),
            opened_crowd(config, StopRequest(), grid),
        ):
            pass
