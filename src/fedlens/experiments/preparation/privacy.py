"""A config's privacy settings as what server and clients do, and the ε that was spent.

Flower's modules do the work (`federated.flower.differential_privacy`, `secure_aggregation`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fedlens.config.schema import Config, cohort_size
from fedlens.params import Params

if TYPE_CHECKING:
    from fedlens.federated.flower.differential_privacy import PrivacySettings

Release = Callable[[Params, int], dict[str, torch.Tensor]]

log = logging.getLogger(__name__)


def settings(config: Config) -> "PrivacySettings":
    from fedlens.federated.flower.differential_privacy import PrivacySettings

    privacy = config.privacy
    return PrivacySettings(
        kind=privacy.name,
        clip_norm=privacy.clip_norm,
        noise_multiplier=privacy.noise_multiplier,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
    )


def release(config: Config) -> Release | None:
    """What the server does to the mean of so many updates before it applies it."""
    if config.privacy.name != "central":
        return None
    from fedlens.federated.flower.differential_privacy import add_noise

    private, size = settings(config), cohort_size(config.federated)

    def release_change(change: Params, accepted: int) -> dict[str, torch.Tensor]:
        # Divided by how many were drawn: how many answered well may itself depend on the data.
        shared = {name: value * (accepted / size) for name, value in change.items()}
        return add_noise(shared, private, cohort=size)

    return release_change


def advise(config: Config) -> None:
    """Warns, before the rounds, of what their ε does not cover."""
    if config.privacy.name == "none":
        return
    from fedlens.federated.flower.differential_privacy import delta_warning

    assert config.federated.clients is not None
    if warning := delta_warning(settings(config), clients=config.federated.clients):
        log.warning("%s", warning)
    if config.head.name != "linear":
        log.warning(
            "ε does not cover the statistics of the %s head, which are sent without noise",
            config.head.name,
        )
    if config.sparse.density is not None and config.sparse.source == "clients":
        log.warning("ε does not cover the scores by which clients choose masks")


def spent(config: Config, records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """ε of all rounds on record, for the result; empty without noise."""
    if config.privacy.name == "none":
        return {}
    from fedlens.federated.flower import differential_privacy

    assert config.federated.clients is not None
    # A client that was drawn counts, whether or not its answer arrived.
    cohorts = [record["participants"] for record in records if "participants" in record]
    taken = Counter(client for cohort in cohorts for client in cohort)
    spending = differential_privacy.privacy_spent(
        settings(config),
        rounds=len(cohorts),
        cohort=cohort_size(config.federated),
        clients=config.federated.clients,
        participations=max(taken.values(), default=None),
    )
    if not spending:
        return {}
    log.info("privacy spent: ε = %.3g at δ = %.0e", spending["epsilon"], spending["delta"])
    return {"privacy": {"kind": config.privacy.name, **spending}}
