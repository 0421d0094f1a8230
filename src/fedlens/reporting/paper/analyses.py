"""Sentences about drift and agreement of clients and about analyses of models, as LaTeX.

Each states the number of seeds or runs, and what chance or a tie would give.
"""

from fedlens.reporting.paper.prose import counted, emphasised, joined, number, tex
from fedlens.reporting.study import captions
from fedlens.reporting.study.content import AlphaCurve, Finding, Observation

LONG = 90  # characters of a fact
KINDS = {
    "clients": "Contributions of clients re-weighted",
    "forget": "Forgetting",
    "merge": "Updates of a round merged",
    "compose": "Task vectors composed",
}


def scaled(curve: AlphaCurve) -> str:
    text = (
        rf"For {emphasised(curve.label)} from {tex(curve.base)}, validation chose $\alpha$ = "
        rf"{number(curve.chosen)}, with a test accuracy of {number(curve.test, 2)}\,\%; as trained "
        rf"it is {number(curve.as_trained, 2)}\,\% (one run)."
    )
    if alike := captions.ties(curve):
        others = joined([number(alpha) for alpha in alike])
        text += rf" On validation this $\alpha$ is tied with {others}."
    if curve.chosen == max(curve.alphas):
        text += r" This $\alpha$ is the largest that was tried: a wider grid may give another."
    if curve.barrier is not None:
        text += f" The loss barrier between both models is {number(curve.barrier, 4)}."
    return text


def analysed(finding: Finding) -> str:
    """Settings and results of an analysis; `model` is the formula of its kind."""
    facts = [(name, value) for name, value in finding.facts if name != "model"] or finding.facts
    parts = [f"{tex(name)} {tex(_shortened(value))}" for name, value in facts]
    return f"{KINDS[finding.kind]} (one run, {emphasised(finding.label)}): {'; '.join(parts)}."


def _shortened(text: str) -> str:
    return text if len(text) <= LONG else text[:LONG].rpartition(",")[0] + ", …"


def interfered(finding: Finding, classes: str) -> str:
    """Accuracies of two clients merged and alone, and the sign conflicts of all clients.

    `classes`: how many a client holds, '' if that is unknown.
    """
    record = finding.record
    pair, count = joined([number(client) for client in record["pair"]]), len(record["clients"])
    merged, alone = (
        joined([number(100 * value, 2) for value in record[f"accuracy_{how}"]])
        for how in ("merged", "alone")
    )
    few = f" ({classes} each)" if classes else ""
    text = (
        f"Clients {pair} merged (round {number(record['round'])} of one run, "
        f"{emphasised(finding.label)}): on validation images of the classes they hold{few}, their "
        rf"accuracies are {merged}\,\% merged and {alone}\,\% alone."
    )
    if (conflict := record["sign_conflict_of_all"]) is not None:
        text += (
            rf" Signs conflict in {number(100 * conflict, 2)}\,\% of the weights that two or more "
            f"of the round's {counted(count, 'client')} change; random signs would conflict in "
            rf"{number(100 * captions.chance(count), 2)}\,\%."
        )
    return text


def observed(observation: Observation, rate: float | None) -> str:
    """The first and the last round, if both were measured."""
    parts = []
    for name, values in (
        ("drift goes", observation.drift),
        ("the cosine of updates", observation.cosine),
        ("sign agreement", observation.sign_agreement),
    ):
        first, last = (values[0], values[-1]) if values else (None, None)
        if first is not None and last is not None:
            parts.append(f"{name} from {number(first, 3)} to {number(last, 3)}")
    if not parts:
        return ""
    rounds = f"round {number(observation.round[0])} to round {number(observation.round[-1])}"
    at = "" if rate is None else f", learning rate {number(rate)}"
    whose = f"{emphasised(observation.label)} ({counted(len(observation.runs), 'seed')}{at})"
    return f"For {whose}, from {rounds}, {joined(parts)}."
