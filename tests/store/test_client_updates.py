from pathlib import Path

import pytest
import torch

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.store.client_updates import KeptUpdates, read_round
from fedlens.store.run_folder import kept_rounds


def vector(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), float(value))}


def add_rounds(kept: KeptUpdates, rounds: range) -> None:
    for number in rounds:
        for client in (4, 2):
            parameters = vector(100 * number + client)
            kept.add(number, client, parameters, examples=10 + client, start=vector(number))


def test_the_last_rounds_are_kept_and_earlier_ones_removed(tmp_path: Path) -> None:
    add_rounds(KeptUpdates(tmp_path, rounds=2), range(1, 6))
    assert kept_rounds(tmp_path) == [4, 5]
    kept = read_round(tmp_path, 5)
    assert kept.start["w"].tolist() == [5, 5, 5]
    assert {client: values["w"][0].item() for client, values in kept.clients.items()} == {
        2: 502,
        4: 504,
    }
    assert kept.examples == {2: 12, 4: 14}


def test_the_clients_of_a_chain_have_its_share(tmp_path: Path) -> None:
    """Changes of 1, 2, 3 and examples of 10, 20, 50: chains (0, 1) and (2) give 30·3 and 50·3."""
    kept = KeptUpdates(tmp_path, rounds=1)
    for client, (examples, number) in enumerate([(10, 0), (20, 0), (50, 1)]):
        moved = vector(client + 1)
        kept.add(1, client, moved, examples=examples, start=vector(0), chain=number)
    shares = read_round(tmp_path, 1).shares()
    assert shares == {0: 30 / 80, 1: 30 / 80, 2: 50 / 80}
    assert sum(share * (client + 1) for client, share in shares.items()) == 240 / 80
    add_rounds(kept, range(2, 3))
    assert read_round(tmp_path, 2).shares() == {2: 12 / 26, 4: 14 / 26}


def test_a_round_repeated_after_a_kill_leaves_the_same_files(tmp_path: Path) -> None:
    add_rounds(KeptUpdates(tmp_path, rounds=2), range(1, 5))
    before = {path.name: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    (tmp_path / "round-000004" / ".partial-client-x").write_text("cut short")
    add_rounds(KeptUpdates(tmp_path, rounds=2), range(3, 5))
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*.safetensors")} == before
    assert not list(tmp_path.rglob(".partial*"))


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    add_rounds(KeptUpdates(tmp_path / "updates", rounds=0), range(1, 3))
    assert not list(tmp_path.iterdir())
    assert kept_rounds(tmp_path / "updates") == []


def test_parameters_may_change_after_they_were_added(tmp_path: Path) -> None:
    kept, parameters = KeptUpdates(tmp_path, rounds=1), vector(100)
    kept.add(1, 0, parameters, examples=10, start=vector(0))
    digest = params.digest(parameters)
    parameters["w"].zero_()
    assert params.digest(read_round(tmp_path, 1).clients[0]) == digest


def test_a_damaged_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    add_rounds(KeptUpdates(tmp_path, rounds=1), range(1, 2))
    (tmp_path / "round-000001" / "client-000004.safetensors").write_bytes(b"cut")
    with pytest.raises(FedlensError, match="lost or damaged"):
        read_round(tmp_path, 1)


def test_a_round_that_is_forgotten_lists_no_file_that_it_removed(tmp_path: Path) -> None:
    kept = KeptUpdates(tmp_path / "updates", rounds=2)
    known: set[str] = set()
    for number in (1, 2, 3):
        kept.add(number, 0, {"w": torch.ones(2)}, examples=1, start={"w": torch.zeros(2)})
        if number == 3:
            kept.forget(number)
        known = kept.files(number, known)
    assert {name.split("/")[1] for name in known} == {"round-000002"}
    assert all((tmp_path / name).exists() for name in known)
