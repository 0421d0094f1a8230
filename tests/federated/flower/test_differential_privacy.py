"""Clipping, noise and ε, against closed forms, statistics of samples and `dp_accounting`."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedlens[flower]'")

from dp_accounting import NeighboringRelation, dp_event, rdp
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import kstest, norm

from fedlens.errors import FedlensError
from fedlens.federated.flower.differential_privacy import (
    CLIPPING_NORM,
    PrivacySettings,
    add_noise,
    delta_warning,
    privacy_spent,
    private_training,
)
from fedlens.federated.flower.messages import ARRAYS, CONFIG, METRICS, VALUES

MANY = 100_000
CENTRAL = PrivacySettings("central", clip_norm=0.5, noise_multiplier=2.0, delta=1e-3)
LOCAL = PrivacySettings("local", clip_norm=0.5, epsilon=0.5, delta=1e-3)


@pytest.fixture(scope="module", autouse=True)
def _identity() -> Iterator[None]:
    """Flower needs the identity of a task to create messages, and sets it once per process."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_task_id", "_run_id", "_node_id"):
            patch.setattr(TaskIdentity, name, 1)
        yield


def values_of(message: Message) -> np.ndarray:
    return message.content.array_records[ARRAYS][VALUES].numpy()


def call(settings: PrivacySettings, start: np.ndarray, update: np.ndarray) -> Message:
    """The reply of a client whose training adds `update`, in float32."""

    def train(message: Message, context: Context) -> Message:
        del context
        metrics = {"loss": 3.5, "correct": 4, "seen": 8, "num-examples": 20}
        arrays = ArrayRecord({VALUES: Array(values_of(message) + update.astype(np.float32))})
        content = RecordDict({ARRAYS: arrays, METRICS: MetricRecord(metrics)})
        return Message(content, reply_to=message)

    return private_training(settings, train)(message_of(start, settings.clip_norm), context())


def message_of(start: np.ndarray, clip_norm: float) -> Message:
    arrays = ArrayRecord({VALUES: Array(start.astype(np.float32))})
    content = RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord({CLIPPING_NORM: clip_norm})})
    return Message(content, dst_node_id=3, message_type=MessageType.TRAIN)


def context() -> Context:
    return Context(1, 3, {}, RecordDict(), {})


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 999), st.floats(0.51, 50.0))
def test_a_large_update_is_scaled_to_the_clipping_norm(seed: int, length: float) -> None:
    draw = np.random.default_rng(seed)
    start, update = draw.normal(size=(2, 40))
    update *= length / np.linalg.norm(update)
    change = values_of(call(CENTRAL, start, update)).astype(np.float64) - start.astype(np.float32)
    assert np.linalg.norm(change) == pytest.approx(0.5, abs=1e-6)
    np.testing.assert_allclose(change, update * 0.5 / length, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 999), st.floats(0.001, 0.49))
def test_a_small_update_is_not_changed(seed: int, length: float) -> None:
    draw = np.random.default_rng(seed)
    start, update = draw.normal(size=(2, 40))
    update *= length / np.linalg.norm(update)
    expected = start.astype(np.float32) + update.astype(np.float32)
    np.testing.assert_allclose(values_of(call(CENTRAL, start, update)), expected, atol=3e-7)


@pytest.mark.parametrize("start", [0.0, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("update", [0.0, 1e-30])  # the square of the second is 0 in float32
def test_an_update_of_norm_zero_is_not_an_error(start: float, update: float) -> None:
    parameters = np.full(9, start)
    for chosen in (CENTRAL, LOCAL):
        reply = call(chosen, parameters, np.full(9, update))
        assert not reply.has_error()
        assert np.isfinite(values_of(reply)).all()
    change = values_of(call(CENTRAL, parameters, np.full(9, update))) - parameters.astype(
        np.float32
    )
    assert np.abs(change).max() <= max(1e-6, np.spacing(np.float32(start)))
    assert np.count_nonzero(np.abs(change) > 1e-20) <= 1


def test_central_privacy_keeps_the_training_metrics() -> None:
    reply = call(CENTRAL, np.zeros(4), np.ones(4))
    metrics = {"loss": 3.5, "correct": 4, "seen": 8, "num-examples": 20}
    assert dict(reply.content.metric_records[METRICS]) == metrics


def test_local_privacy_hides_the_training_metrics() -> None:
    reply = call(LOCAL, np.zeros(4), np.ones(4))
    metrics = {"loss": 0.0, "correct": 0, "seen": 8, "num-examples": 20}
    assert dict(reply.content.metric_records[METRICS]) == metrics


def test_without_privacy_training_is_not_wrapped() -> None:
    def train(message: Message, context: Context) -> Message:
        raise AssertionError

    assert private_training(PrivacySettings(), train) is train


@pytest.mark.parametrize("chosen", [CENTRAL, LOCAL])
def test_replies_without_an_update_are_not_changed(chosen: PrivacySettings) -> None:
    message = message_of(np.zeros(3), 0.5)
    for reply in (
        Message(Error(0, "no disk"), reply_to=message),
        Message(RecordDict({"unprepared": ConfigRecord()}), reply_to=message),
    ):
        assert private_training(chosen, lambda m, c, r=reply: r)(message, context()) is reply  # type: ignore[misc]


def test_local_noise_has_the_sigma_of_the_theorem() -> None:
    update = np.zeros(MANY)
    update[0] = 40.0
    noise = values_of(call(LOCAL, np.zeros(MANY), update))
    sigma = 2 * 0.5 * math.sqrt(2 * math.log(1.25 / 1e-3)) / 0.5
    assert noise[1:].std() == pytest.approx(sigma, rel=0.02)
    assert abs(noise[1:].mean()) < 5 * sigma / math.sqrt(MANY)
    assert kstest(noise[1:] / sigma, norm.cdf).pvalue > 1e-6


@pytest.mark.parametrize("cohort", [1, 10])
def test_central_noise_on_the_mean_has_sigma_zc_over_m(cohort: int) -> None:
    change = {
        "w": torch.full((MANY // 100, 100), 7.0, dtype=torch.float64),
        "scalar": torch.tensor(1.0, dtype=torch.float64),
    }
    noisy = add_noise(change, CENTRAL, cohort=cohort)
    sigma = 2.0 * 0.5 / cohort
    assert {name: (v.shape, v.dtype) for name, v in noisy.items()} == {
        name: (v.shape, v.dtype) for name, v in change.items()
    }
    noise = (noisy["w"] - 7.0).flatten()
    assert noise.std().item() == pytest.approx(sigma, rel=0.02)
    assert abs(noise.mean().item()) < 5 * sigma / math.sqrt(MANY)
    assert kstest(noise.numpy() / sigma, norm.cdf).pvalue > 1e-6
    assert noisy["scalar"] != 1.0
    assert (change["w"] == 7.0).all()


@pytest.mark.parametrize("kind", ["none", "local"])
def test_the_server_adds_noise_under_central_privacy_only(kind: str) -> None:
    change = {"w": torch.ones(5, dtype=torch.float64)}
    assert torch.equal(add_noise(change, PrivacySettings(kind), cohort=3)["w"], change["w"])


def test_noise_depends_on_no_seed_and_changes_no_global_state() -> None:
    change = {"w": torch.zeros(50, dtype=torch.float64)}
    drawn, after = [], []
    for _ in range(2):
        np.random.seed(7)
        torch.manual_seed(7)
        drawn.append(add_noise(change, CENTRAL, cohort=1)["w"])
        drawn.append(torch.from_numpy(values_of(call(LOCAL, np.zeros(50), np.ones(50)))).double())
        after.append((np.random.normal(), torch.randn(()).item()))
    assert not torch.isclose(drawn[0], drawn[2]).any()
    assert not torch.isclose(drawn[1], drawn[3]).any()
    np.random.seed(7)
    torch.manual_seed(7)
    assert after == [(np.random.normal(), torch.randn(()).item())] * 2


def exact(multiplier: float, releases: int, delta: float) -> float:
    """The ε of a composed Gaussian: Balle & Wang, 2018, https://arxiv.org/abs/1805.06530."""
    mu = math.sqrt(releases) / multiplier

    def excess(epsilon: float) -> float:
        first = norm.cdf(mu / 2 - epsilon / mu)
        return float(first - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)) - delta

    return float(brentq(excess, 0.0, 500.0))


def total(spent: dict[str, float | str], name: str = "epsilon") -> float:
    value = spent[name]
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize(("z", "rounds"), [(2.0, 1), (4.0, 10), (10.0, 100)])
def test_epsilon_with_full_participation_is_a_tight_bound(z: float, rounds: int) -> None:
    """One replaced update moves the sum by 2C, so the noise zC is z/2 of what it may move."""
    chosen = PrivacySettings("central", noise_multiplier=z, delta=1e-5)
    spent = privacy_spent(chosen, rounds=rounds, cohort=20, clients=20)
    least = exact(z / 2, rounds, 1e-5)
    for name in ("epsilon", "epsilon_secret_cohorts"):
        assert least <= total(spent, name) <= 1.2 * least


@pytest.mark.parametrize("rounds", [1, 10, 100])
def test_local_epsilon_composes_over_a_clients_participations(rounds: int) -> None:
    spent = privacy_spent(LOCAL, rounds=1000, cohort=5, clients=500, participations=rounds)
    least = exact(math.sqrt(2 * math.log(1250)) / 0.5, rounds, 1e-3)
    assert least <= total(spent) <= 1.2 * least
    assert total(spent) <= rounds * 0.5  # less than the releases' own ε summed
    assert spent == privacy_spent(LOCAL, rounds=rounds, cohort=1, clients=2)


def test_epsilon_of_a_sampled_cohort_by_hand() -> None:
    """z = 2 counts as 1. At order 2 a round costs ln(1 + q²·2e) (Wang et al., 2019, theorem 27).

    T rounds of it become T·that + ln(1/2) − ln(2δ) (Canonne et al., 2020, proposition 12).
    """
    spent = privacy_spent(CENTRAL, rounds=100, cohort=10, clients=100)
    at_two = 100 * math.log(1 + 0.1**2 * 2 * math.e) + math.log(0.5) - math.log(2 * 1e-3)
    assert at_two == pytest.approx(10.815, abs=1e-3)
    assert total(spent, "epsilon_secret_cohorts") == pytest.approx(at_two, rel=1e-6)
    assert total(spent) == pytest.approx(85.175, abs=1e-3)
    assert spent | {"epsilon": 0.0, "epsilon_secret_cohorts": 0.0} == {
        "epsilon": 0.0,
        "epsilon_secret_cohorts": 0.0,
        "delta": 1e-3,
        "method": "rdp",
        "relation": "replace-one",
    }


@pytest.mark.slow
@pytest.mark.parametrize(("z", "cohort", "rounds"), [(3.0, 5, 60), (8.0, 30, 25)])
def test_epsilon_equals_that_of_dp_accounting(z: float, cohort: int, rounds: int) -> None:
    accountant = rdp.RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    release = dp_event.GaussianDpEvent(z / 2)
    drawn = dp_event.SampledWithoutReplacementDpEvent(200, cohort, release)
    accountant.compose(dp_event.SelfComposedDpEvent(drawn, rounds))
    chosen = PrivacySettings("central", noise_multiplier=z, delta=1e-4)
    spent = privacy_spent(chosen, rounds=rounds, cohort=cohort, clients=200)
    amplified = total(spent, "epsilon_secret_cohorts")
    assert amplified == pytest.approx(accountant.get_epsilon(1e-4), rel=1e-9)


def test_the_smaller_of_the_bounds_with_and_without_sampling_is_used() -> None:
    chosen = PrivacySettings("central", noise_multiplier=0.2, delta=1e-3)
    spent = privacy_spent(chosen, rounds=100, cohort=10, clients=100)
    assert total(spent) == total(spent, "epsilon_secret_cohorts")


@pytest.mark.slow
def test_epsilon_grows_with_rounds_and_cohorts_and_falls_with_noise() -> None:
    def central(z: float = 2.0, rounds: int = 20, cohort: int = 5) -> float:
        chosen = PrivacySettings("central", noise_multiplier=z, delta=1e-3)
        return total(
            privacy_spent(chosen, rounds=rounds, cohort=cohort, clients=100),
            "epsilon_secret_cohorts",
        )

    spent = central()
    assert central(rounds=10) < spent < central(rounds=40)
    assert central(cohort=2) < spent < central(cohort=10)
    assert central(z=4.0) < spent < central(z=1.5)


def test_nothing_is_spent_without_privacy_or_rounds() -> None:
    assert privacy_spent(PrivacySettings(), rounds=5, cohort=2, clients=9) == {}
    assert privacy_spent(CENTRAL, rounds=0, cohort=2, clients=9) == {}


def test_a_delta_of_one_client_or_more_gives_a_warning() -> None:
    for chosen in (CENTRAL, LOCAL):
        assert delta_warning(chosen, clients=999) is None
        warning = delta_warning(chosen, clients=1000)
        assert warning is not None
        assert "set delta to 0.0001 or less" in warning
    assert delta_warning(PrivacySettings(delta=0.5), clients=100) is None


@pytest.mark.parametrize(
    "keys",
    [
        {"kind": "centrall"},
        *({"epsilon": 1.0}, {"epsilon": 0.0}),
        *({"clip_norm": 0.0}, {"clip_norm": math.inf}),
        *({"noise_multiplier": 0.0}, {"noise_multiplier": math.nan}),
        *({"delta": 1.0}, {"delta": 0.0}),
    ],
)
def test_settings_without_a_guarantee_are_rejected(keys: dict[str, float]) -> None:
    with pytest.raises(FedlensError, match=next(iter(keys))):
        PrivacySettings(**{"kind": "local", **keys})  # type: ignore[arg-type]
