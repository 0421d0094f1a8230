"""YAML that means something else than its writer thinks, or too much, is refused with its line."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedlens import yaml_reader
from fedlens.config.compose import compose, load
from fedlens.errors import FedlensError
from fedlens.suites.suite import find

LAUGHS = "\n".join(
    ["a0: &a0 [1, 1]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
)
BAD = {
    "train: {lr: 1}\nseed: 1\ntrain: {lr: 2}": "line 3: the key 'train' is there twice",
    "train: {lr: 1, lr: 2}": "line 1: the key 'lr' is there twice",
    "a: [{b: 1,\n b: 2}]": "line 2: the key 'b' is there twice",
    "a: &it [1, *it]": r"line 1: the alias \*it stands for what contains it",
    "a: &it\n  b: {c: *it}": r"line 2: the alias \*it stands for what contains it",
    "a: " + "[" * 10_000: "nested more than 50 levels deep",
    "a: " + "{a: " * 10_000: "nested more than 50 levels deep",
    "\n".join(f"{' ' * n}a:" for n in range(200)): "line 51: it is nested more than 50 levels",
    LAUGHS: "more than 100000 values",
    "a: *nothing": "is not a YAML file",
    "a: [": "is not a YAML file",
    "a: !!python/object/apply:os.getcwd []": "is not a YAML file",
    "a: 2026-13-45": "is not a YAML file",
    "a: " + "9" * 5000: "is not a YAML file",
    "? [1, 2]\n: 3": "is not a YAML file",
    "a: 1\n---\nb: 2": "is not a YAML file",
    "a: \x01": "is not a YAML file",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: ascii(text[:20]))
def test_it_is_refused_in_a_sentence_that_names_the_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(FedlensError, match=BAD[text]) as caught:
        yaml_reader.read(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", BAD, ids=lambda text: ascii(text[:20]))
def test_experiments_suites_and_stored_configs_are_read_by_it(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    for reader in (lambda: compose(str(path), []), lambda: find(str(path)), lambda: load(path)):
        with pytest.raises(FedlensError) as caught:
            reader()
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_same_key_in_two_mappings_and_an_alias_beside_its_anchor_are_fine() -> None:
    text = "a: &it {b: 1}\nc: *it\nd: [{b: 1}, {b: 2}]\nb: b\n"
    assert yaml_reader.parse(text, "it") == {
        "a": {"b": 1}, "c": {"b": 1}, "d": [{"b": 1}, {"b": 2}], "b": "b",
    }  # fmt: skip


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(TREES)
def test_what_yaml_writes_is_read_as_it_was(tree: object) -> None:
    assert yaml_reader.parse(yaml.safe_dump(tree), "it") == tree


@pytest.mark.parametrize(
    "defaults",
    ["5", "{a: b}", "[5]", "[[a]]", "[{a: 5}]", "[{a: {b: c}}]", "[{a: b, c: d}]", "[{5: a}]",
     "[from_file]", "[/experiment/from_file]", "[{/experiment: from_file}]", "[mine]",
     "[/experiment/mine]", "[../mine]", "null", "['']"],
)  # fmt: skip
def test_defaults_that_are_no_presets_or_the_file_itself(defaults: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults: {defaults}\nseed: 1\n")
    with pytest.raises(FedlensError) as caught:
        compose(str(path), [])
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_link_to_itself_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.symlink_to(path)
    for reader in (lambda: compose(str(path), []), lambda: find(str(path))):
        with pytest.raises(FedlensError, match="cannot be read"):
            reader()
