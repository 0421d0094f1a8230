"""What is checked before any process of a federation starts."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedlens[flower]'")

from fedlens.config.compose import compose
from fedlens.config.schema import Config
from fedlens.data.partitions import node_name
from fedlens.errors import FedlensError
from fedlens.experiments.clients import open_session
from fedlens.experiments.flower import SERVER_SHARD, apps, deployment
from fedlens.experiments.preparation.local_data import write_shards
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


def test_a_superlink_needs_no_torch() -> None:
    code = "import sys, fedlens.experiments.flower.deployment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_node_connects_as_its_folder_says_unless_options_differ(tmp_path: Path) -> None:
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


def test_root_certificates_overrule_a_folder_that_says_insecure(tmp_path: Path) -> None:
    content = {**KNOWN, "root_certificates": None, "insecure": True}
    write_json(tmp_path / "superlink.json", content)
    connection = deployment.connection_of(tmp_path, root_certificates=tmp_path / CA)
    assert connection == Connection("lab:1", tmp_path / CA)


def test_root_certificates_without_tls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FedlensError, match="leave --root-certificates out"):
        deployment.connection_of(tmp_path, root_certificates=tmp_path / CA, insecure=True)


def test_a_node_without_its_data_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(FedlensError, match=r"is not a complete shard \(shard.json is missing"):
        deployment.run_node(
            tmp_path,
            "node-0",
            Connection("127.0.0.1:1", insecure=True),
            StopRequest(),
            shard=tmp_path / "node-0",
            reconnect=1.0,
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_node_that_waits_for_its_superlink_can_be_stopped(tmp_path: Path) -> None:
    write_shards(secure_config(tmp_path), tmp_path, 1)
    stop = StopRequest()
    stop.name = "SIGINT"
    with pytest.raises(Interrupted):
        deployment.run_node(
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
    write_shards(config, tmp_path, nodes)
    monkeypatch.setenv(SERVER_SHARD, str(tmp_path / "server"))
    homes = {i: {apps.SHARD: str(tmp_path / node_name(i))} for i in range(nodes)}
    grid = InProcessGrid(apps.client, homes)  # type: ignore[arg-type]
    if nodes == CLIENTS:
        with open_session(config, StopRequest(), grid) as session:
            assert session.data.partition is not None
    else:
        with (
            pytest.raises(FedlensError, match=f"fedlens flower partition … --nodes {CLIENTS}`"),
            open_session(config, StopRequest(), grid),
        ):
            pass


def test_shards_can_be_read_by_their_owner_only(tmp_path: Path) -> None:
    config = secure_config(tmp_path)
    write_shards(config, tmp_path, 2)
    (tmp_path / "node-0").chmod(0o755)  # as an earlier version left it
    write_shards(config, tmp_path, 2)
    for name in ("server", "node-0", "node-1"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
        assert all(one.stat().st_mode & 0o777 == 0o600 for one in (tmp_path / name).iterdir())


def test_a_device_that_does_not_exist_is_refused_before_a_node_starts(tmp_path: Path) -> None:
    write_shards(secure_config(tmp_path), tmp_path, 1)
    with pytest.raises(FedlensError, match="--device toaster is unknown"):
        deployment.run_node(
            tmp_path,
            "node-0",
            Connection("127.0.0.1:1", insecure=True),
            StopRequest(),
            shard=tmp_path / "node-0",
            reconnect=1.0,
            device="toaster",
        )
