"""The README.md of an exported model: data, method, accuracy with its interval, licence, command.

It begins with the YAML that model hubs read. Everything in it is from config.json and from records.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from fedlens.reporting.study.labels import counted
from fedlens.reporting.study.runs import Run
from fedlens.reporting.study.statistics import estimate, proportion

UNKNOWN = "unknown"  # the hub's word for a licence that is not known
MAX_CLASSES = 20  # that are listed


def model_card(config: Mapping[str, Any], repetitions: Sequence[Run]) -> str:
    """`config` is the content of config.json; `repetitions` are this run and its other seeds."""
    about = config["fedlens"]
    header = yaml.safe_dump(_header(config), sort_keys=False, allow_unicode=True)
    sections = {
        "Accuracy": _accuracy(about, repetitions),
        "Data": _data(config),
        "Method": _method(about),
        "Use": _use(config),
        "Licence of the weights": _licence(about),
        "Repeat the run": _repeat(about, repetitions),
    }
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    return f"---\n{header}---\n\n# {about['run']}\n\n{_summary(config)}\n\n{body}\n"


def _header(config: Mapping[str, Any]) -> dict[str, Any]:
    about = config["fedlens"]
    weights = about["weights"]
    federated = ["federated-learning"] if "clients" in about else []
    accuracy = {"type": "accuracy", "name": "test top-1", "value": about["test"]["top1"]}
    return {
        "license": weights["license"] or UNKNOWN,
        "library_name": "timm" if about["loads_in_timm"] else "fedlens",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "fedlens", *federated],
        **({"base_model": weights["repository"]} if weights["repository"] else {}),
        "datasets": [about["data"]],
        "metrics": ["accuracy"],
        "model-index": [
            {
                "name": about["run"],
                "results": [
                    {
                        "task": {"type": "image-classification"},
                        "dataset": {
                            "name": about["labels"]["data"],
                            "type": about["data"],
                            "split": "test",
                        },
                        "metrics": [accuracy],
                    }
                ],
            }
        ],
    }


def _summary(config: Mapping[str, Any]) -> str:
    about = config["fedlens"]
    return (
        f"An image classifier with {config['num_classes']} classes: {about['backbone']} at "
        f"{about['resolution']} px, trained on {about['labels']['data']} with fedlens "
        f"{about['version']}."
    )


def _accuracy(about: Mapping[str, Any], repetitions: Sequence[Run]) -> str:
    test, choice = about["test"], about["choice"]
    low, high = proportion(test["top1"], test["count"])
    lines = [
        f"- Test top-1: {test['top1']:.2%}, 95 % interval {low:.2%} to {high:.2%} (Wilson, "
        f"{counted(test['count'], 'test image')}).",
        f"- Test top-5: {test['top5']:.2%}. Test loss: {test['loss']:.4f}.",
    ]
    if about["validation"]:
        lines.append(f"- Validation top-1: {about['validation']['top1']:.2%}.")
    seeds = ", ".join(str(run.seed) for run in repetitions)
    if len(repetitions) > 1:
        over = estimate([run.test for run in repetitions])
        lines.append(
            f"- Over {len(repetitions)} seeds ({seeds}) of the same config: mean test top-1 "
            f"{over.mean:.2f} % ± {over.half:.2f} (95 % Student interval)."
        )
    else:
        lines.append(
            "- One seed: the interval covers the draw of the test images, not the randomness of "
            "training."
        )
    chosen = (
        f"The parameters of {about['unit']} {choice['unit']} were chosen on validation images"
        if choice["chosen_on"] == "validation"
        else f"The parameters are those of the last {about['unit']}, {choice['unit']}"
    )
    return "\n".join(lines) + f"\n\n{chosen}; the test images had no part in the choice."


def _data(config: Mapping[str, Any]) -> str:
    about, names = config["fedlens"], config["label_names"]
    more = f" and {len(names) - MAX_CLASSES} more" if len(names) > MAX_CLASSES else ""
    text = (
        f"{about['labels']['data']} (`data={about['data']}`), {len(names)} classes: "
        f"{', '.join(map(str, names[:MAX_CLASSES]))}{more}. "
        "All names are in `config.json`."
    )
    if "clients" in about:
        text += (
            f" The training images are split over {counted(about['clients'], 'client')} "
            f"({about['labels']['partition']})."
        )
    return text


def _method(about: Mapping[str, Any]) -> str:
    labels = about["labels"]
    rows = {
        "algorithm": labels.get("algorithm", "central training"),
        "local steps": about.get("local_steps"),
        "trained": labels["trainable"],
        "fraction of the weights trained": about.get("density"),
        "mask rule": labels.get("mask_rule"),
        "head": labels["head"],
        "optimizer": labels["optimizer"],
        "seed": about["seed"],
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *lines])


def _use(config: Mapping[str, Any]) -> str:
    about, cfg = config["fedlens"], config["pretrained_cfg"]
    classes, name, size = config["num_classes"], about["backbone"], about["resolution"]
    own = about["own_backbone"]
    parts = [
        f"""```python
import fedlens as fl

model = fl.load_model("DIR"{", backbone=make_net" if own else ""})  # this folder
logits = model(model.preprocess(pixels))  # uint8 [B, 3, H, W] → [B, {classes}]
labels = [model.classes[index] for index in logits.argmax(1)]
```"""
    ]
    if own:
        parts.append(f"`make_net` is the function `{name}`, which is not in this folder.")
    if about["loads_in_timm"]:
        arguments = "".join(f", {key}={value!r}" for key, value in config["model_args"].items())
        parts.append(f"""With timm alone:

```python
import timm

model = timm.create_model(
    "{config["architecture"]}", num_classes={classes}{arguments},
    checkpoint_path="DIR/model.safetensors",
).eval()
```""")
    else:
        parts.append("`timm.create_model` cannot build this model: use `fl.load_model`.")
    parts.append(
        f"Inputs are RGB images in [0, 1], normalised with mean {_numbers(cfg['mean'])} and "
        f"standard deviation {_numbers(cfg['std'])}, and resized to {size}×{size} pixels: the "
        "whole image, bicubic, with antialiasing."
    )
    return "\n\n".join(parts)


def _numbers(values: Sequence[float]) -> str:
    return f"({', '.join(f'{value:g}' for value in values)})"


def _licence(about: Mapping[str, Any]) -> str:
    weights = about["weights"]
    if not weights["pretrained"]:
        return (
            "No pretrained weights were used: the model started from random weights. Whoever "
            "publishes it chooses a licence."
        )
    start = f"The model started from pretrained weights: {weights['source']}"
    start += f" (sha256 `{weights['sha256']}`)." if weights["sha256"] else "."
    if weights["license"]:
        return f"{start} Their licence is {weights['license']}, as their publisher states it."
    return f"{start} Their licence is not known: check {weights['source']} before you publish."


def _repeat(about: Mapping[str, Any], repetitions: Sequence[Run]) -> str:
    this = next(run for run in repetitions if run.name == about["run"])
    session = this.manifest["sessions"][0]
    versions = [f"{name} {value}" for name, value in session["versions"].items()]
    software = ", ".join([f"Python {session['python']}", *versions])
    return (
        f"```\n{about['command']}\n```\n\n"
        f"It ran on {session['device']} with {counted(session['threads'], 'thread')} ({software}; "
        f"commit {session['git'] or 'not known'}). The same software and number of threads give "
        f"the same parameters, with the sha256 `{about['parameters_sha256']}`."
    )
