import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedlens import files
from fedlens.errors import FedlensError
from fedlens.store.records import SEAL, read_record, write_record

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip
RECORDS = st.dictionaries(st.text().filter(lambda key: key != SEAL), VALUES, max_size=5)


@given(RECORDS, st.sampled_from([None, 2]))
def test_a_record_is_read_as_it_was_written(record: dict[str, Any], indent: int | None) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "record.json")
        write_record(path, record, indent=indent)
        assert read_record(path) == record
        assert list(json.loads(path.read_text())) == [*record, SEAL]


@given(RECORDS.filter(bool), st.data())
def test_a_changed_bit_is_refused_or_changes_nothing(
    record: dict[str, Any], data: st.DataObject
) -> None:
    """Where the name of the seal itself is hit, the record is one without a seal."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "record.json")
        write_record(path, record)
        content = bytearray(path.read_bytes())
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:
            found = read_record(path)
        except FedlensError as error:
            assert str(path) in str(error)
            assert "\n" not in str(error)
        else:
            assert {key: found[key] for key in record} == record


def test_a_record_without_a_seal_is_of_before(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"x": 1})
    assert read_record(tmp_path / "a.json") == {"x": 1}


@pytest.mark.parametrize(
    "content",
    [b"", b"[1]", b"3", b'"words"', b"null", b"\xff\xfe{}", b"{", b'{"a": ' * 10**5, b"[" * 10**5,
     b'{"a":' * 60 + b"1" + b"}" * 60],
)  # fmt: skip
def test_what_is_no_record_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(FedlensError, match=r"a\.json") as caught:
        read_record(path)
    assert "\n" not in str(caught.value)
    path.unlink()
    path.mkdir()
    with pytest.raises(FedlensError, match=r"a\.json"):
        read_record(path)


@given(st.integers(1, 120), st.sampled_from(["[]", "{}"]))
def test_depth_is_counted_exactly(depth: int, kind: str) -> None:
    inner = '{"a": ' if kind == "{}" else "["
    text = inner * depth + "1" + kind[1] * depth
    assume(depth > files.MAX_DEPTH or files.parse_json(text))
    if depth > files.MAX_DEPTH:
        with pytest.raises(ValueError, match="nested too deeply"):
            files.parse_json(text)
