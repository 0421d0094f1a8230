"""How configs are spoken of: partitions, heads, rules, schedules, in a few words each."""

from typing import Any

from fedlens.reporting.study.runs import Method

HEADS = {
    "linear": "linear head",
    "trained": "head trained first",
    "ridge": "ridge head",
    "class_means": "class-mean head",
}
ALGORITHMS = {
    "fedavg": "FedAvg", "fedprox": "FedProx", "scaffold": "SCAFFOLD", "fednova": "FedNova",
    "fedavgm": "FedAvgM", "fedadam": "FedAdam", "fedyogi": "FedYogi", "median": "median",
    "trimmed_mean": "trimmed mean", "norm_clipping": "norm clipping", "ties": "TIES",
    "dare": "DARE", "breadcrumbs": "Breadcrumbs", "consensus": "consensus",
    "task_arithmetic": "task arithmetic", "turns": "FedAvg in turns",
    "turns_ties": "TIES in turns",
}  # fmt: skip


def federated(method: Method) -> bool:
    return method.get("federated.clients") is not None


def partition(method: Method) -> str:
    """'IID', 'Nc=5', …; 'central' where there are no clients."""
    if not federated(method):
        return "central"
    told = method.config["partition"]
    least = f", at least {told['min_size']} each" if told["min_size"] > 1 else ""
    return {
        "iid": "IID",
        "classes": f"Nc={told['classes_per_client']}",
        "dirichlet": f"Dirichlet {told['alpha']:g}{least}",
        "quantity": f"sizes σ={told['sigma']:g}{least}",
    }[told["name"]]


def evenness(method: Method) -> tuple[int, float]:
    """Sorts partitions from pooled and even data to the most skewed."""
    told = method.config["partition"]
    if not federated(method):
        return (0, 0.0)
    return {
        "iid": (1, 0.0),
        "quantity": (2, float(told["sigma"])),
        "dirichlet": (3, -float(told["alpha"])),
        "classes": (4, -float(told["classes_per_client"])),
    }[told["name"]]


def sparse(method: Method) -> bool:
    return method.get("sparse.density") is not None


def kind(method: Method) -> str:
    return "sparse" if sparse(method) else "dense"


def calibrates(method: Method) -> bool:
    """Whether its mask needs examples; magnitudes and chance do not."""
    return sparse(method) and str(method.get("sparse.rule")).endswith("sensitive")


def rule(method: Method) -> str:
    return str(method.get("sparse.rule")).replace("_", " ") if sparse(method) else "dense"


def algorithm(method: Method) -> str:
    """'FedAvg', 'TIES', …; 'FedAvg, server step 2' where an average is not taken as it is."""
    told = method.config["algorithm"]
    name = ALGORITHMS.get(told["name"], told["name"])
    lengthened = told["server"] == "average" and told["server_lr"] != 1
    return f"{name}, server step {told['server_lr']:g}" if lengthened else name


def trains(method: Method) -> bool:
    """Whether anything was left to train: a frozen head on a frozen backbone is not."""
    return any("train" in record for run in method.runs for record in run.metrics)


def trained(method: Method) -> str:
    """What is trained, under which head: 'everything, ridge head frozen'."""
    told, head = method.config["train"]["what"], method.config["head"]
    words = HEADS.get(head["name"], head["name"])
    if not trains(method):
        return f"{words} alone"
    if told == "head":
        return f"{words} only"
    part = "everything" if told == "full" else f"last {told.partition(':')[2]} blocks"
    return f"{part}, {words}{' frozen' if head['freeze'] else ''}"


def schedule(method: Method) -> str:
    told = method.config["train"]["schedule"]
    warm = f", warm-up {told['warmup']:g}" if told["warmup"] else ""
    return f"{told['name']}{warm}"


def density(method: Method) -> str:
    found = method.get("sparse.density")
    return "dense" if found is None else f"density {found:g}"


def units(method: Method) -> int:
    """Epochs or rounds done; of several seeds the most."""
    return max(int(run.result["units"]) for run in method.runs)


def described(method: Method, *, but: tuple[str, ...] = ()) -> str:
    """A method in one line; `but` leaves out what a table varies."""
    parts: dict[str, Any] = {"trained": trained(method)}
    if sparse(method):
        parts |= {"density": density(method), "rule": rule(method)}
    if federated(method):
        parts["algorithm"] = algorithm(method)
        parts["partition"] = partition(method)
        if trains(method):
            parts["steps"] = f"J={method.get('federated.local_steps')}"
    else:
        parts["partition"] = "central"
    return ", ".join(str(words) for name, words in parts.items() if name not in but)


def masked(method: Method) -> str:
    """A mask by what it depends on: clients, if they calibrate, and rounds, if it is calibrated."""
    said = [rule(method), density(method)]
    if calibrates(method):
        said.append(counted(int(method.get("sparse.rounds")), "round"))
        if method.get("sparse.source") == "clients":
            said.append(partition(method))
    return ", ".join(said)


def spent(method: Method) -> str:
    """'4 rounds × 5 clients × 4 steps of batch 32', or '2 epochs, 1126 steps of batch 32'."""
    trained = [record for record in method.runs[0].metrics if "train" in record]
    batch = f"batch {method.get('train.batch_size')}"
    if not federated(method):
        steps = sum(record.get("steps", 0) for record in trained)
        told = f", {steps} steps" if steps else ""
        return f"{counted(len(trained), 'epoch')}{told} of {batch}"
    cohort = max(len(record["participants"]) for record in trained)
    each = counted(int(method.get("federated.local_steps")), "step")
    return f"{counted(len(trained), 'round')} × {counted(cohort, 'client')} × {each} of {batch}"


def counted(count: int, noun: str) -> str:
    """'1 run', '2 runs', '3 analyses'."""
    many = f"{noun[:-2]}es" if noun.endswith("is") else f"{noun}s"
    return f"{count} {noun if count == 1 else many}"
