"""What a config says of privacy, as what server and clients do, and what it came to.

Flower's modules do the work (`federated.flower.privacy`, `federated.flower.secure`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fedlens.config.schema import Config, cohort_size

if TYPE_CHECKING:
    from fedlens.federated.flower.differential_privacy import PrivacySettings

Noise = Callable[[dict[str, torch.Tensor], int], dict[str, torch.Tensor]]

log = logging.getLogger(__name__)


def settings(config: Config) -> "PrivacySettings":
    from fedlens.federated.flower.differential_privacy import PrivacySettings

    told = config.privacy
    return PrivacySettings(
        kind=told.name,
        clip_norm=told.clip_norm,
        noise_multiplier=told.noise_multiplier,
        epsilon=told.epsilon,
        delta=told.delta,
    )


def noise(config: Config) -> Noise:
    """What the server does to the mean of so many updates before it takes the step."""
    if config.privacy.name != "central":
        return lambda change, cohort: change
    from fedlens.federated.flower.differential_privacy import noised

    told, asked = settings(config), cohort_size(config.federated)

    def private(change: dict[str, torch.Tensor], answered: int) -> dict[str, torch.Tensor]:
        # Divided by how many were asked: how many answered well may itself depend on the data.
        shared = {name: value * (answered / asked) for name, value in change.items()}
        return noised(shared, told, cohort=asked)

    return private


def advise(config: Config) -> None:
    """Says before the rounds what would make their privacy an empty word."""
    if config.privacy.name == "none":
        return
    from fedlens.federated.flower.differential_privacy import advice

    assert config.federated.clients is not None
    if warning := advice(settings(config), clients=config.federated.clients):
        log.warning("%s", warning)
    if config.head.name != "linear":
        log.warning("ε does not count the %s head's statistics, which are exact", config.head.name)
    if config.sparse.density is not None and config.sparse.source == "clients":
        log.warning("ε does not count the scores by which clients choose masks")


def spent(config: Config, records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """ε of all rounds on record, for the result; empty without noise."""
    if config.privacy.name == "none":
        return {}
    from fedlens.federated.flower import differential_privacy

    assert config.federated.clients is not None
    # Who was asked counts, whether or not an answer came: it may have been on its way.
    played = [record["participants"] for record in records if "participants" in record]
    taken = Counter(client for cohort in played for client in cohort)
    found = differential_privacy.spent(
        settings(config),
        rounds=len(played),
        cohort=cohort_size(config.federated),
        clients=config.federated.clients,
        participations=max(taken.values(), default=None),
    )
    if not found:
        return {}
    log.info("privacy spent: ε = %.3g at δ = %.0e", found["epsilon"], found["delta"])
    return {"privacy": {"kind": config.privacy.name, **found}}
