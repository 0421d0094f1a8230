"""Sentences about what was observed in rounds and asked of finished models, as LaTeX.

Each says of how many seeds or runs it is, and what chance alone, or a tie, would give.
"""

from fedlens.reporting.paper.prose import counted, emphasised, joined, number, tex
from fedlens.reporting.study import captions
from fedlens.reporting.study.content import AlphaCurve, Finding, Observation

LONG = 90  # characters of a fact
KINDS = {
    "clients": "Clients re-weighted",
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
        text += rf" On validation this $\alpha$ ties with {others}."
    if curve.chosen == max(curve.alphas):
        text += r" This $\alpha$ is the largest tried: a wider grid may choose another."
    if curve.barrier is not None:
        text += f" The loss barrier on the way is {number(curve.barrier, 4)}."
    return text


def told(finding: Finding) -> str:
    """What was asked and what came out; `what` itself is the formula of its kind."""
    facts = [(name, value) for name, value in finding.facts if name != "what"] or finding.facts
    said = [f"{tex(name)} {tex(_shortened(value))}" for name, value in facts]
    return f"{KINDS[finding.kind]} (one run, {emphasised(finding.label)}): {'; '.join(said)}."


def _shortened(text: str) -> str:
    return text if len(text) <= LONG else text[:LONG].rpartition(",")[0] + ", …"


def interfered(finding: Finding, classes: str) -> str:
    """Two clients merged and each alone; signs of all, beside what chance gives.

    `classes`: how many a client holds, '' where that is unknown.
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
            f"of the round's {counted(count, 'client')} move; signs drawn at random would in "
            rf"{number(100 * captions.chance(count), 2)}\,\%."
        )
    return text


def observed(seen: Observation, rate: float | None) -> str:
    """The first and the last round, where something was measured in both."""
    parts = []
    for name, values in (
        ("drift goes", seen.drift),
        ("the cosine of updates", seen.cosine),
        ("sign agreement", seen.sign_agreement),
    ):
        first, last = (values[0], values[-1]) if values else (None, None)
        if first is not None and last is not None:
            parts.append(f"{name} from {number(first, 3)} to {number(last, 3)}")
    if not parts:
        return ""
    rounds = f"round {number(seen.round[0])} to round {number(seen.round[-1])}"
    at = "" if rate is None else f", learning rate {number(rate)}"
    whose = f"{emphasised(seen.label)} ({counted(len(seen.runs), 'seed')}{at})"
    return f"For {whose}, from {rounds}, {joined(parts)}."
