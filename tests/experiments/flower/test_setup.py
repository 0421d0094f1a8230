"""A node takes plain data of a fixed schema from a server: no paths, no environment, no devices."""

import json
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedlens[flower]'")

from fedlens.config.compose import compose
from fedlens.config.schema import Config
from fedlens.errors import FedlensError
from fedlens.experiments.flower.setup import (
    CHARACTERS,
    NodeSettings,
    decode_head,
    decode_masks,
    encode_setup,
    read_client_part,
)
from fedlens.federated.flower.setup import Setup

OWN = NodeSettings("cpu", 3)
SECRET = "secret-3f9a"


@cache
def config() -> Config:
    words = ["engine=flower", "device=cuda", "threads=7", "run.root=/srv", "tracker=wandb"]
    return compose("quickstart_fedavg", [*words, "engine.threads_per_client=5"])


@cache
def honest() -> str:
    return encode_setup(config(), "ab" * 32).config


def part() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(honest())
    return content


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values that are not dictionaries."""
    if not isinstance(value, dict):
        return [here]
    return [place for key, one in value.items() for place in paths(one, (*here, key))]


def changed(place: tuple[Any, ...], value: Any) -> str:
    content = deepcopy(part())
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return json.dumps(content)


def test_a_node_learns_what_is_sent_and_keeps_the_rest_to_itself() -> None:
    read = read_client_part(honest(), OWN)
    assert (read.device, read.engine.threads_per_client) == ("cpu", 3)
    assert read.backbone == config().backbone.but(sha256="ab" * 32)
    mine, sent = asdict(read), asdict(config())
    for key in ("seed", "augment", "head", "train", "sparse", "federated", "algorithm", "privacy"):
        assert mine[key] == sent[key]
    assert (read.threads, read.run, read.tracker) == (None, Config().run, Config().tracker)


PLACES = sorted(paths(json.loads(honest())))


@pytest.mark.parametrize("text", ["${oc.env:SECRET}", "${seed}", "/etc/passwd", "~/x", "../x"])
@pytest.mark.parametrize("place", PLACES[:: len(PLACES) // 12], ids=str)
def test_interpolations_and_paths_are_refused_wherever_they_are(
    place: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    with pytest.raises(FedlensError) as refused:
        read_client_part(changed(place, text), OWN)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("backbone", "weights"), "weights.pth"),
        (("backbone", "weights"), None),
        (("data", "root"), "a/b"),
        (("device",), "cuda"),
        (("threads",), 64),
        (("engine",), {"name": "flower"}),
        (("run",), {"root": "x"}),
        (("tracker",), {"name": "wandb"}),
        (("plugins",), ["mine.py"]),
        (("${oc.env:SECRET}",), 1),
        (("train", "unknown"), 1),
        (("backbone",), "vit_pico"),
        (("vectorise",), "yes"),
        (("seed",), 1.5),
        (("seed",), [1]),
        (("train",), None),
        (("federated", "clients"), "many"),
        (("experiment",), "x" * 300),
    ],
)
def test_what_is_not_of_the_schema_is_refused(place: tuple[str, ...], value: Any) -> None:
    with pytest.raises(FedlensError):
        read_client_part(changed(place, value), OWN)


def test_a_large_cache_cannot_be_asked_for() -> None:
    read = read_client_part(changed(("train", "prefix_cache_gb"), 1e6), OWN)
    assert read.train.prefix_cache_gb == Config().train.prefix_cache_gb
    none = read_client_part(changed(("train", "prefix_cache_gb"), 0.0), OWN)
    assert none.train.prefix_cache_gb == 0


JSON = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
        st.sampled_from(["${oc.env:HOME}", "???", "/etc", "os.system", "timm", "a.b"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.slow
@given(st.sampled_from(PLACES), JSON)
@settings(max_examples=60, deadline=None)
def test_any_value_in_any_place_is_read_or_refused(place: tuple[str, ...], value: Any) -> None:
    home = str(Path.home())
    try:
        read = read_client_part(changed(place, value), OWN)
    except FedlensError as refused:
        assert home not in str(refused)
    else:
        assert (read.device, read.engine.threads_per_client) == ("cpu", 3)
        assert read.backbone.weights is None
        assert home not in str(asdict(read))


@given(st.one_of(st.text(), JSON.map(json.dumps)))
@settings(max_examples=60, deadline=None)
def test_any_text_that_is_no_client_part_is_refused(text: str) -> None:
    with pytest.raises(FedlensError):
        read_client_part(text, OWN)


@pytest.mark.parametrize("text", ["[" * 200_000, " " * (CHARACTERS + 1), "a: &x [*x]", "!!python"])
def test_texts_that_break_parsers_are_refused(text: str) -> None:
    with pytest.raises(FedlensError):
        read_client_part(text, OWN)


def test_heads_and_masks_must_fit() -> None:
    head = nn.Linear(4, 3)
    sent = encode_setup(config(), None, head=head, masks={"w": torch.ones(2, 5, dtype=torch.bool)})
    read = decode_head(sent, 3)
    assert read is not None
    assert torch.equal(read.weight, head.weight)
    assert decode_masks(sent, {"w": torch.zeros(2, 5)})["w"].all()
    with pytest.raises(FedlensError):
        decode_head(sent, 5)
    with pytest.raises(FedlensError):
        decode_masks(sent, {"v": torch.zeros(2, 5)})
    for tensors in (
        {"head/weight": torch.zeros(3, 4)},
        {"head/weight": torch.zeros(3, 4), "head/bias": torch.zeros(2)},
        {"head/weight": torch.zeros(3), "head/bias": torch.zeros(3)},
        {"head/weight": torch.zeros(3, 4), "head/bias": torch.zeros(3), "head/x": torch.zeros(1)},
    ):
        with pytest.raises(FedlensError):
            decode_head(Setup("{}", tensors), 3)
    with pytest.raises(FedlensError):
        decode_masks(Setup("{}", {"mask/w": torch.zeros(2)}), {"w": torch.zeros(2, 5)})
