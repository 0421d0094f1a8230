from pathlib import Path

import pytest
import torch

from fedlens.errors import FedlensError
from fedlens.files import TEMPORARY
from fedlens.store.client_states import ClientStates


def state(number: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2, 3), number), "b": torch.tensor([number / 3])}


def states(folder: Path) -> ClientStates:
    return ClientStates(folder / "clients", torch.device("cpu"))


def same(found: object, expected: dict[str, torch.Tensor]) -> bool:
    assert isinstance(found, dict)
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], value) for name, value in expected.items()
    )


def names(where: ClientStates) -> set[str]:
    return {path.name for path in where.folder.glob("*")}


def test_what_was_put_is_found_saved_or_not_and_after_a_restart(tmp_path: Path) -> None:
    where = states(tmp_path)
    assert where.get(3) is None
    lent = state(1)
    where.put(3, lent)
    lent["w"].zero_()  # the caller's tensors may change: what was put does not
    assert same(where.get(3), state(1))
    assert not where.folder.exists()  # nothing is written before a checkpoint is
    table = where.save("round-000001")
    assert table == {"3": "client-3-round-000001.safetensors"}
    assert same(where.get(3), state(1))
    again = states(tmp_path)
    again.put_back(table)
    assert same(again.get(3), state(1))
    assert again.get(4) is None


def test_an_older_checkpoint_s_table_brings_the_older_state_back(tmp_path: Path) -> None:
    where = states(tmp_path)
    tables = []
    for number in (1, 2):
        where.put(0, state(number))
        where.put(number, state(10 * number))
        tables.append(where.save(f"round-{number}"))
    where.put(0, state(3))  # of a round that no checkpoint saw
    where.put_back(tables[0])
    assert same(where.get(0), state(1))
    assert same(where.get(1), state(10))
    assert where.get(2) is None
    where.put_back(tables[1])
    assert same(where.get(0), state(2))


def test_only_what_is_new_is_written_again(tmp_path: Path) -> None:
    where = states(tmp_path)
    where.put(0, state(0))
    where.put(1, state(1))
    where.save("round-1")
    where.put(1, state(2))
    assert where.save("round-2") == {
        "0": "client-0-round-1.safetensors",
        "1": "client-1-round-2.safetensors",
    }
    assert len(names(where)) == 3


def test_pruning_keeps_exactly_what_tables_refer_to(tmp_path: Path) -> None:
    where = states(tmp_path)
    tables = []
    for number in (1, 2, 3):
        where.put(0, state(number))
        if number == 1:
            where.put(7, state(7))
        tables.append(where.save(f"round-{number}"))
    (where.folder / f"{TEMPORARY}client-0-round-4.safetensors-0123abcd").write_bytes(b"half")
    where.prune(tables[1:])
    assert names(where) == {
        "client-0-round-2.safetensors",
        "client-0-round-3.safetensors",
        "client-7-round-1.safetensors",
    }
    where.prune([])
    assert names(where) == set()
    states(tmp_path / "nowhere").prune([])  # a run without memories has no folder


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_a_lost_file_is_named_with_its_client(tmp_path: Path, how: str) -> None:
    where = states(tmp_path)
    where.put(5, state(1))
    where.save("round-1")
    (path,) = where.folder.iterdir()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(b"nonsense")
    with pytest.raises(FedlensError, match=r"client-5-round-1.*lost or damaged") as caught:
        where.get(5)
    assert "\n" not in str(caught.value)
