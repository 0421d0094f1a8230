"""Texts of other parties are parsed within limits and shown as one harmless line."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.federated.flower import plain
from fedlens.federated.flower.plain import NotPlain, one_line, parsed, printable

PLAIN = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-plain.LARGEST, plain.LARGEST),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(),
    ),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=6,
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@pytest.mark.slow
@given(PLAIN)
@settings(max_examples=100)
def test_plain_data_round_trip(value: Any) -> None:
    text = json.dumps(value)
    if depth(value) <= plain.DEPTH:
        assert parsed(text, limit=len(text)) == value
    with pytest.raises(NotPlain, match="characters"):
        parsed(text, limit=len(text) - 1)


@pytest.mark.parametrize(
    "text",
    [
        *("", "nonsense", "{", "[" * 200_000, '{"a":' * 100_000, "[1,]", "'a'"),
        *("[Infinity]", "[-Infinity]", "[NaN]", "1e400", f"[{2**63}]", "9" * 5000),
        "[" * (plain.DEPTH + 1) + "]" * (plain.DEPTH + 1),
    ],
)
def test_what_is_not_plain_is_refused(text: str) -> None:
    with pytest.raises(NotPlain):
        parsed(text, limit=10**6)


@given(st.text(st.characters(exclude_categories=())), st.sampled_from(["", "\x1b[31m", "\u202e"]))
@settings(max_examples=200)
def test_a_shown_text_is_one_printable_line(text: str, code: str) -> None:
    line = one_line(text + code + text)
    assert line.isprintable()
    assert len(line) <= plain.SHOWN
    assert len(line.splitlines()) <= 1


def test_ordinary_sentences_stay_as_they_are() -> None:
    sentence = "Größe 3 μm: its node failed (out of memory)."
    assert one_line(sentence) == printable(sentence) == sentence
    assert one_line("a" * 1000) == "a" * (plain.SHOWN - 1) + "…"
    assert printable("a\tb\x1bc") == "a\tb c"
    assert one_line(math.inf) == "inf"
