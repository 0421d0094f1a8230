"""No number moves: tiny runs, analyses of them and pieces of the library, against what they were.

Everywhere: whole numbers, choices, participants and mask counts exactly, other numbers to 1e-6, or
to 1e-3 where the CPU rounds otherwise than the one that `expected.json` was made on (a few layers
of plain torch tell). Bits depend on the machine; they are compared where FEDLENS_GOLDEN_REFERENCE
names a file that `python tests/golden/reference.py --commit REV` has made on this one.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.golden import compare
from tests.golden.runs import ANALYSES, FLOWER, LIBRARY, RUNS, TWINS, World, made_with, own_cache

EXPECTED = compare.read(Path(__file__).with_name("expected.json"))
ALIKE = made_with()["arithmetic"] == EXPECTED["made_with"]["arithmetic"]
TOLERANCE = compare.TOLERANCE if ALIKE else compare.ELSEWHERE
# On another kind of CPU these end further away, at every commit: the first one's loss is 34.
AMPLIFYING = {"most_sensitive", "calibrated_in_four_rounds"}
REFERENCE = os.environ.get("FEDLENS_GOLDEN_REFERENCE")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with own_cache(tmp_path_factory.mktemp("golden_cache")):
        yield World(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def reference() -> dict[str, Any] | None:
    return compare.read(Path(REFERENCE)) if REFERENCE else None


def _skip_without_flower(name: str) -> None:
    if name in FLOWER and find_spec("flwr") is None:
        pytest.skip("Flower is not installed: pip install 'fedlens[flower]'")


@pytest.mark.parametrize("name", [*LIBRARY, *RUNS, *ANALYSES])
def test_numbers_are_as_they_were(
    world: World, reference: dict[str, Any] | None, name: str
) -> None:
    _skip_without_flower(name)
    found = world.facts(name)
    amplified = not ALIKE and name in AMPLIFYING
    tolerance = compare.AMPLIFIED if amplified else TOLERANCE
    assert not compare.near(found, EXPECTED[name], tolerance)
    if reference:
        assert not compare.equal(found, reference[name])


@pytest.mark.parametrize("name", TWINS)
def test_how_a_run_is_run_changes_no_bit(world: World, name: str) -> None:
    _skip_without_flower(name)
    found, twin = world.facts(name), world.facts(TWINS[name])
    assert not compare.equal(found, twin)


def test_every_expectation_is_of_the_table() -> None:
    assert EXPECTED.keys() - {"made_with"} == {*LIBRARY, *RUNS, *ANALYSES}


def test_what_moved_is_noticed() -> None:
    """The comparison itself: it sees a small change of any kind, and lets rounding pass."""
    facts = EXPECTED["least_sensitive"]
    assert not compare.near(facts, facts)
    assert not compare.equal(facts, facts)
    for path, change in (
        (("result", "test_loss"), lambda x: x * (1 + 1e-5)),
        (("result", "chosen_unit"), lambda x: x + 1),
        (("rounds", -1, "participants"), lambda x: x[::-1]),
        (("rounds", -1, "bytes_up"), lambda x: x + 1),
        (("parameters", "last", "sketch", "norm"), lambda x: x * (1 + 1e-5)),
        (("parameters", "last", "sketch", "projections"), lambda x: [-one for one in x]),
        (("masks", "trained"), lambda x: x + 1),
        (("masks", "sampled_bits"), lambda x: EXPECTED["random"]["masks"]["sampled_bits"]),
    ):
        assert compare.near(_changed(facts, path, change), facts), path
    rounded = _changed(facts, ("result", "test_loss"), lambda x: x * (1 + 1e-8))
    assert not compare.near(rounded, facts)
    assert compare.equal(rounded, facts)
    other_bits = _changed(facts, ("parameters", "last", "sha256"), lambda x: x[::-1])
    assert not compare.near(other_bits, facts)
    assert compare.equal(other_bits, facts)


def _changed(facts: Any, path: tuple[str | int, ...], change: Any) -> Any:
    """A copy of `facts` with another value at `path`."""
    if not path:
        return change(facts)
    first, *rest = path
    if isinstance(facts, list):
        assert isinstance(first, int)
        copy = list(facts)
        copy[first] = _changed(facts[first], tuple(rest), change)
        return copy
    return {**facts, first: _changed(facts[first], tuple(rest), change)}
