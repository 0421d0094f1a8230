"""Client-level differential privacy by Flower's mods: clip to ‖δ_k‖ ≤ C, add N(0, σ²), compute ε.

Central (McMahan et al., 2018, https://arxiv.org/abs/1710.06963): clients clip, and a trusted server
adds noise of σ = zC/m to the mean of m updates. Local: each client adds its own noise.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.serverapp import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyConfig,
    RdpAccountant,
    SamplingMethod,
)
from flwr.supercore.differential_privacy import (
    KEY_CLIPPING_NORM,
    add_gaussian_noise_inplace,
    compute_stdv,
    get_norm,
)

from fedlens.errors import FedlensError, suggest
from fedlens.federated.flower.messages import ARRAYS, METRICS
from fedlens.params import Params

CLIPPING_NORM = KEY_CLIPPING_NORM  # the key of C in a message's config, under central privacy
MIN_UPDATE_NORM = 1e-6  # in units of C: far below the noise


@dataclass(frozen=True)
class PrivacySettings:
    """The noise is ordinary floating-point noise from the operating system's entropy.

    It never comes from the run's seed, which would let others subtract it, and it does not
    withstand attacks on its last bits (Mironov, 2012, https://doi.org/10.1145/2382196.2382264).
    """

    kind: str = "none"  # none, central or local
    clip_norm: float = 1.0  # C
    noise_multiplier: float = 1.0  # central: z, the noise on the sum of updates in units of C
    epsilon: float = 0.5  # local: of one release
    delta: float = 1e-5

    def __post_init__(self) -> None:
        """Rejects values without a guarantee: theorem A.1 holds for ε and δ below 1 only."""
        if self.kind not in ("none", *MODS):
            options = suggest(self.kind, ("none", *MODS))
            raise FedlensError(f"There is no kind of differential privacy '{self.kind}': {options}")
        for name in ("clip_norm", "noise_multiplier"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise FedlensError(f"{name} must be positive and finite, not {value:g}.")
        for name in ("epsilon", "delta"):
            if not 0 < (value := getattr(self, name)) < 1:
                raise FedlensError(f"{name} must lie between 0 and 1, not {value:g}.")

    @property
    def local_multiplier(self) -> float:
        """σ over the sensitivity 2C, as `LocalDpMod` sets it (Dwork & Roth, 2014, theorem A.1)."""
        return math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon


# Two updates of norm C are up to 2C apart, which is the sensitivity of one client's release.
MODS: dict[str, Callable[[PrivacySettings], Mod]] = {
    "central": lambda s: fixedclipping_mod,
    "local": lambda s: LocalDpMod(s.clip_norm, 2 * s.clip_norm, s.epsilon, s.delta),
}


def private_training(settings: PrivacySettings, train: ClientAppCallable) -> ClientAppCallable:
    """`train` with its update clipped and, under local privacy, with noise added.

    Under local privacy the reply does not reveal the training loss either: loss and correct are 0.
    """
    if settings.kind == "none":
        return train
    mod = MODS[settings.kind](settings)

    def private(message: Message, context: Context) -> Message:
        reply = train(message, context)
        if reply.has_error() or ARRAYS not in reply.content:
            return reply  # it contains no update
        if settings.kind == "local":
            reply.content.metric_records[METRICS].update({"loss": 0.0, "correct": 0})
        _avoid_zero_norm(message, reply, MIN_UPDATE_NORM * settings.clip_norm)
        with _os_entropy():
            return mod(message, context, lambda message, context: reply)

    return private


def add_noise(change: Params, settings: PrivacySettings, *, cohort: int) -> dict[str, torch.Tensor]:
    """Adds central privacy's noise to `change`, the unweighted mean of `cohort` clipped updates.

    `cohort` is the number that the sum was divided by: the noise on the sum is zC.
    """
    if settings.kind != "central":
        return dict(change)
    arrays = {name: value.detach().cpu().numpy().copy() for name, value in change.items()}
    with _os_entropy():
        add_gaussian_noise_inplace(
            list(arrays.values()),
            compute_stdv(settings.noise_multiplier, settings.clip_norm, cohort),
        )
    return {name: torch.from_numpy(arrays[name]).to(value.device) for name, value in change.items()}


def privacy_spent(
    settings: PrivacySettings,
    *,
    rounds: int,
    cohort: int,
    clients: int,
    participations: int | None = None,
) -> dict[str, float | str]:
    """The (ε, δ) of `rounds` rounds, where neighbouring datasets differ in one replaced client.

    Replacing an update moves the sum by up to 2C, so noise of zC counts as a multiplier of z/2.
    `epsilon` composes `participations` releases, the most rounds that any one client took part in
    (default: all rounds), and holds against everyone. Central: `epsilon_secret_cohorts` also uses
    that cohorts are drawn at random without replacement. It holds only against observers who know
    neither the seed nor the records, so not against nodes: their config contains the seed.

    ε covers the model that clients train. It does not cover what else they reveal: ridge
    statistics, mask scores, and the losses and norms in records.
    """
    if settings.kind == "none" or not rounds:
        return {}
    releases = rounds if participations is None else participations
    central = settings.kind == "central"
    multiplier = settings.noise_multiplier / 2 if central else settings.local_multiplier
    epsilon = _composed(multiplier, releases, settings.delta)
    spent: dict[str, float | str] = {
        "epsilon": epsilon,
        "delta": settings.delta,
        "method": "rdp",
        "relation": NeighboringRelation.REPLACE_ONE.value,
    }
    if central:
        amplified = _composed(multiplier, rounds, settings.delta, drawn=(cohort, clients))
        # With little noise the bound with sampling is the looser one, though both hold.
        spent["epsilon_secret_cohorts"] = min(epsilon, amplified)
    return spent


def delta_warning(settings: PrivacySettings, *, clients: int) -> str | None:
    """A warning if δ is so large that publishing one client's data would satisfy it."""
    if settings.kind == "none" or settings.delta < 1 / clients:
        return None
    return (
        f"delta={settings.delta:g} is not below 1/K = {1 / clients:g}, so publishing one client's "
        f"data would satisfy it: set delta to {0.1 / clients:g} or less."
    )


def _composed(
    multiplier: float, releases: int, delta: float, *, drawn: tuple[int, int] | None = None
) -> float:
    """ε of Gaussian releases; `drawn` = (m, K): each samples m of K without replacement."""
    size, population = drawn or (1, 1)
    # Without amplification ε depends on σ over the sensitivity alone, and the sensitivity is
    # already that of a replacement; Flower supports only the other relation there.
    relation, sampling = (
        (NeighboringRelation.REPLACE_ONE, SamplingMethod.WITHOUT_REPLACEMENT)
        if drawn
        else (NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION)
    )
    accountant = RdpAccountant(PrivacyConfig(delta, population, relation, sampling))
    accountant.compose(GaussianPrivacyEvent(multiplier, size, population), releases)
    return accountant.get_epsilon(delta)


def _avoid_zero_norm(message: Message, reply: Message, step: float) -> None:
    """Changes one value of an update of norm 0, because Flower's clipping divides by the norm."""
    start, result = message.content.array_records[ARRAYS], reply.content.array_records[ARRAYS]
    values = {name: result[name].numpy() for name in result}
    if get_norm([value - start[name].numpy() for name, value in values.items()]) > 0:
        return
    first = next(iter(values.values())).flat
    first[0] += max(step, np.spacing(abs(first[0])))
    reply.content[ARRAYS] = ArrayRecord({name: Array(value) for name, value in values.items()})


@contextmanager
def _os_entropy() -> Iterator[None]:
    """Seeds numpy's global state, which Flower draws from, from the operating system.

    A forked process inherits the state, so two clients could add the same noise, and other code
    may have set a seed.
    """
    before = np.random.get_state()
    np.random.seed()
    try:
        yield
    finally:
        np.random.set_state(before)
