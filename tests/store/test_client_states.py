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


def same(actual: object, expected: dict[str, torch.Tensor]) -> bool:
    assert isinstance(actual, dict)
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[name], value) for name, value in expected.items()
    )


def names(memory: ClientStates) -> set[str]:
    return {path.name for path in memory.folder.glob("*")}


def test_a_state_is_read_back_before_and_after_a_checkpoint_and_a_restart(tmp_path: Path) -> None:
    empty = states(tmp_path)
    assert empty.get(3) is None
    lent = state(1)
    memory = empty.updated({3: lent})
    lent["w"].zero_()  # the caller's tensors may change
    assert same(memory.get(3), state(1))
    assert empty.get(3) is None
    assert not memory.folder.exists()  # nothing is written before a checkpoint is
    table = memory.save("round-000001")
    assert table == {"3": "client-3-round-000001.safetensors"}
    assert same(memory.get(3), state(1))
    restored = states(tmp_path).restored(table)
    assert same(restored.get(3), state(1))
    assert restored.get(4) is None


def test_an_update_leaves_earlier_states_as_they_were(tmp_path: Path) -> None:
    first = states(tmp_path).updated({0: state(1), 1: state(10)})
    second = first.updated({0: state(2)})
    assert same(first.get(0), state(1))
    assert same(second.get(0), state(2))
    assert same(second.get(1), state(10))
    with pytest.raises(AttributeError):
        first.unsaved = {}  # type: ignore[misc]


def test_the_table_of_an_older_checkpoint_restores_the_older_states(tmp_path: Path) -> None:
    memory, tables = states(tmp_path), []
    for number in (1, 2):
        memory = memory.updated({0: state(number), number: state(10 * number)})
        tables.append(memory.save(f"round-{number}"))
        memory = memory.restored(tables[-1])
    memory = memory.updated({0: state(3)})  # of a round without a checkpoint
    first, second = (memory.restored(table) for table in tables)
    assert same(first.get(0), state(1))
    assert same(first.get(1), state(10))
    assert first.get(2) is None
    assert same(second.get(0), state(2))


def test_only_new_states_are_written(tmp_path: Path) -> None:
    memory = states(tmp_path).updated({0: state(0), 1: state(1)})
    memory = memory.restored(memory.save("round-1")).updated({1: state(2)})
    assert memory.save("round-2") == {
        "0": "client-0-round-1.safetensors",
        "1": "client-1-round-2.safetensors",
    }
    assert len(names(memory)) == 3


def test_pruning_keeps_exactly_the_files_of_the_tables(tmp_path: Path) -> None:
    memory, tables = states(tmp_path), []
    for number in (1, 2, 3):
        extra = {7: state(7)} if number == 1 else {}
        memory = memory.updated({0: state(number), **extra})
        tables.append(memory.save(f"round-{number}"))
        memory = memory.restored(tables[-1])
    (memory.folder / f"{TEMPORARY}client-0-round-4.safetensors-0123abcd").write_bytes(b"half")
    memory.prune(tables[1:])
    assert names(memory) == {
        "client-0-round-2.safetensors",
        "client-0-round-3.safetensors",
        "client-7-round-1.safetensors",
    }
    memory.prune([])
    assert names(memory) == set()
    states(tmp_path / "nowhere").prune([])  # a run without states has no folder


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_a_lost_file_is_named_with_its_client(tmp_path: Path, how: str) -> None:
    memory = states(tmp_path).updated({5: state(1)})
    memory = memory.restored(memory.save("round-1"))
    (path,) = memory.folder.iterdir()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(b"nonsense")
    with pytest.raises(FedlensError, match=r"client-5-round-1.*lost or damaged") as caught:
        memory.get(5)
    assert "\n" not in str(caught.value)
