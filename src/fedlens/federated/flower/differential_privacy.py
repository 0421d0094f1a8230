"""Differential privacy of clients by Flower's modules: clip to ‖δ_k‖ ≤ C, add N(0, σ²), count ε.

Central (McMahan et al., 2018, https://arxiv.org/abs/1710.06963): clients clip, and a trusted server
adds σ = zC/m to the plain mean of m. Local: each client adds its own noise, and trusts no server.

ε is about the model that clients train, in which one client is replaced by any other. It says
nothing of what else is told: ridge statistics, mask scores, and the losses and norms in records.
Noise comes from the operating system's entropy, never from the run's seed, which would undo it; it
is ordinary floating-point noise, not proof against an attack on its last bits (Mironov, 2012).
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

from fedlens.federated.flower.messages import ARRAYS, METRICS
from fedlens.params import Params

CLIPPING_NORM = KEY_CLIPPING_NORM  # where a message's config says C, under central privacy
NUDGE = 1e-6  # of C: far below the noise


@dataclass(frozen=True)
class PrivacySettings:
    kind: str = "none"
    clip_norm: float = 1.0  # C
    noise_multiplier: float = 1.0  # central: z, the noise on the sum of updates in units of C
    epsilon: float = 0.5  # local: of one release
    delta: float = 1e-5

    def __post_init__(self) -> None:
        """Refuses what would guarantee nothing: theorem A.1 holds for ε and δ below 1 only."""
        known = self.kind == "none" or self.kind in MODS
        scales = all(0 < value < math.inf for value in (self.clip_norm, self.noise_multiplier))
        if not (known and scales and 0 < self.epsilon < 1 and 0 < self.delta < 1):
            raise ValueError(f"{self} is no privacy")

    @property
    def local_multiplier(self) -> float:
        """σ over the sensitivity 2C, as `LocalDpMod` sets it (Dwork & Roth, 2014, theorem A.1)."""
        return math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon


# Two updates of length C are up to 2C apart: that far one client's release may move.
MODS: dict[str, Callable[[PrivacySettings], Mod]] = {
    "central": lambda s: fixedclipping_mod,
    "local": lambda s: LocalDpMod(s.clip_norm, 2 * s.clip_norm, s.epsilon, s.delta),
}


def wrapped(settings: PrivacySettings, train: ClientAppCallable) -> ClientAppCallable:
    """`train` with its update clipped and, under local privacy, noised before it leaves.

    Local privacy withholds how well the client's data are fitted too: loss and correct are 0.
    """
    if settings.kind == "none":
        return train
    mod = MODS[settings.kind](settings)

    def private(message: Message, context: Context) -> Message:
        reply = train(message, context)
        if reply.has_error() or ARRAYS not in reply.content:
            return reply  # it says nothing of the data
        if settings.kind == "local":
            reply.content.metric_records[METRICS].update({"loss": 0.0, "correct": 0})
        _nudge(message, reply, NUDGE * settings.clip_norm)
        with _entropy():
            return mod(message, context, lambda message, context: reply)

    return private


def noised(change: Params, settings: PrivacySettings, *, cohort: int) -> dict[str, torch.Tensor]:
    """The mean of `cohort` clipped updates, which must weigh alike, with central privacy's noise.

    `cohort` is what the sum was divided by: the noise on the sum is zC, which is what ε counts.
    """
    if settings.kind != "central":
        return dict(change)
    arrays = {name: value.detach().cpu().numpy().copy() for name, value in change.items()}
    with _entropy():
        add_gaussian_noise_inplace(
            list(arrays.values()),
            compute_stdv(settings.noise_multiplier, settings.clip_norm, cohort),
        )
    return {name: torch.from_numpy(arrays[name]).to(value.device) for name, value in change.items()}


def spent(
    settings: PrivacySettings,
    *,
    rounds: int,
    cohort: int,
    clients: int,
    participations: int | None = None,
) -> dict[str, float | str]:
    """What `rounds` rounds told of any one client: (ε, δ), when it is replaced by another.

    To replace an update moves the sum by up to 2C, so noise of zC counts as a multiplier of z/2.
    `epsilon` counts `participations`, the most rounds that any one client took part in (all, if it
    is not given), and holds for everybody. Central: `epsilon_secret_cohorts` counts besides that a
    client is in a cohort, drawn without replacement, by chance; it holds for those alone who know
    neither seed nor records, and so for no node, since the config that nodes are told has the seed.
    """
    if settings.kind == "none" or not rounds:
        return {}
    releases = rounds if participations is None else participations
    central = settings.kind == "central"
    multiplier = settings.noise_multiplier / 2 if central else settings.local_multiplier
    known = _composed(multiplier, releases, settings.delta)
    found: dict[str, float | str] = {
        "epsilon": known,
        "delta": settings.delta,
        "method": "rdp",
        "relation": NeighboringRelation.REPLACE_ONE.value,
    }
    if central:
        hidden = _composed(multiplier, rounds, settings.delta, drawn=(cohort, clients))
        # With little noise the bound for a sample is the looser one, though both hold.
        found["epsilon_secret_cohorts"] = min(known, hidden)
    return found


def advice(settings: PrivacySettings, *, clients: int) -> str | None:
    """A warning, if δ is so large that to give one client away whole would be private."""
    if settings.kind == "none" or settings.delta < 1 / clients:
        return None
    return (
        f"privacy.delta={settings.delta:g} is not below 1/K = {1 / clients:g}: to publish one "
        f"client's data would satisfy it; set privacy.delta={0.1 / clients:g} or less."
    )


def _composed(
    multiplier: float, releases: int, delta: float, *, drawn: tuple[int, int] | None = None
) -> float:
    """ε of Gaussian releases; `drawn` = (m, K) if each is of m of K, without replacement."""
    size, population = drawn or (1, 1)
    # Without amplification a Gaussian's ε depends on σ over the sensitivity alone, and the
    # sensitivity is already that of a replacement; Flower only knows the other relation there.
    relation, sampling = (
        (NeighboringRelation.REPLACE_ONE, SamplingMethod.WITHOUT_REPLACEMENT)
        if drawn
        else (NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION)
    )
    accountant = RdpAccountant(PrivacyConfig(delta, population, relation, sampling))
    accountant.compose(GaussianPrivacyEvent(multiplier, size, population), releases)
    return accountant.get_epsilon(delta)


def _nudge(message: Message, reply: Message, least: float) -> None:
    """Moves one value of an update of length 0, by which Flower's clipping would divide."""
    sent, found = message.content.array_records[ARRAYS], reply.content.array_records[ARRAYS]
    values = {name: found[name].numpy() for name in found}
    if get_norm([value - sent[name].numpy() for name, value in values.items()]) > 0:
        return
    first = next(iter(values.values())).flat
    first[0] += max(least, np.spacing(abs(first[0])))
    reply.content[ARRAYS] = ArrayRecord({name: Array(value) for name, value in values.items()})


@contextmanager
def _entropy() -> Iterator[None]:
    """Lends Flower, which draws from numpy's global state, one that nobody can foresee.

    numpy seeds it from the operating system when a process starts, but a fork inherits it, and
    then two clients would add the same noise; and anybody may have set a seed.
    """
    before = np.random.get_state()
    np.random.seed()
    try:
        yield
    finally:
        np.random.set_state(before)
