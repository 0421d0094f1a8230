"""What `fedlens export` writes: `fl.load_model` and timm load it to the accuracy of its run."""

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedlens as fl
from fedlens.config.compose import compose, load
from fedlens.config.identity import run_name
from fedlens.experiments.build import with_resolution
from fedlens.experiments.loaded_run import LoadedRun, load_run
from fedlens.experiments.preparation.local_data import dataset, training_images
from fedlens.experiments.run import start
from fedlens.runtime.stop import StopRequest
from fedlens.store.run_folder import RunFolder
from fedlens.store.table import load_runs
from tests.integration.conftest import FEDERATED, ON_FEATURES, TINY, Call

SMALL = ["backbone.resolution=32", "train.epochs=2", "data.test_per_class=3"]
RESNET = ["backbone=timm:test_resnet.r160_in1k", "backbone.resolution=32"]
CASES: dict[str, tuple[str, list[str]]] = {
    "central": ("quickstart", []),
    "sparse fedavg": ("quickstart_sparse", [*FEDERATED, "sparse.density=0.1", "sparse.rounds=2"]),
    "head on features": ("quickstart", [*RESNET, *ON_FEATURES, "head=ridge"]),
    "trained head on features": ("quickstart", [*RESNET, *ON_FEATURES]),
    "batch norm": ("quickstart", [*RESNET, "train.epochs=2"]),
    "sparse batch norm": (
        "quickstart_sparse",
        [*RESNET, *FEDERATED, "sparse.density=0.1", "sparse.rounds=1"],
    ),
    "vit of timm": ("quickstart", ["backbone=timm:test_vit.r160_in1k", *SMALL]),
    "convnext": ("quickstart", ["backbone=timm:test_convnext.r160_in1k", *SMALL]),
    "resnet10t": ("quickstart", ["backbone=timm:resnet10t.c3_in1k", *SMALL, "train.epochs=1"]),
    "two classifiers": ("quickstart", ["backbone=timm:deit_tiny_distilled_patch16_224.fb_in1k",
                        *SMALL, *ON_FEATURES]),
}  # fmt: skip
OF_FEDLENS = ("central", "sparse fedavg")  # vit_pico, which timm does not know


@dataclass
class Exported:
    folder: RunFolder
    model: Path
    config: dict[str, Any]

    @property
    def about(self) -> dict[str, Any]:
        section: dict[str, Any] = self.config["fedlens"]
        return section

    def run(self) -> LoadedRun:
        return load_run(self.folder, StopRequest())

    def split(self, name: str) -> tuple[Tensor, Tensor]:
        """uint8 pixels and labels, loaded as `whole` does but not through the run."""
        config = load(self.folder.config)
        data = dataset(config)
        if name == "test":
            images = data.load_test().limited(config.data.test_per_class)
            return images.pixels, images.labels
        images, _, held_out, *_ = training_images(config, data)
        return images.pixels[held_out], images.labels[held_out]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ResNet with statistics of its own, which only its buffers hold, and lively features."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model("test_resnet", num_classes=0, zero_init_last=False)
        for name, value in model.state_dict().items():
            if name.endswith("running_mean"):
                value.normal_(std=0.1)
            elif name.endswith("running_var"):
                value.uniform_(0.5, 2.0)
    path = tmp_path_factory.mktemp("weights") / "resnet.safetensors"
    save_file({**model.state_dict(), "fc.bias": torch.zeros(1000)}, path)
    return path


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Callable[[str], Exported]:
    """Runs and exports a case, once."""
    made: dict[str, Exported] = {}
    base = tmp_path_factory.mktemp("exports")

    def once(name: str) -> Exported:
        if name not in made:
            experiment, overrides = CASES[name]
            given = [*TINY, "evaluate.select=last", *overrides, f"run.root={base / name / 'runs'}"]
            if overrides[:1] == RESNET[:1]:
                given += ["backbone.pretrained=true", f"backbone.weights={weights}"]
            folder = start(compose(experiment, given))
            from fedlens.cli.commands.export import export

            target = base / name / "model"
            export(str(folder.path), target)
            made[name] = Exported(folder, target, json.loads((target / "config.json").read_text()))
        return made[name]

    return once


@pytest.fixture
def no_gradients(make: Callable[[str], Exported], name: str) -> Iterator[None]:
    """Once the model is trained."""
    make(name)
    with torch.inference_mode():
        yield


def assert_top1(logits: Tensor, labels: Tensor, expected: float) -> None:
    """Equal, but for images whose two best classes lie closer than rounding can tell apart."""
    best, second = logits.softmax(1).topk(2).values.T
    ties = int((best - second < 1e-6).sum())
    assert ties <= 0.02 * len(labels)
    assert abs(int((logits.argmax(1) == labels).sum()) - expected * len(labels)) <= ties + 1e-9


def timm_model(exported: Exported) -> nn.Module:
    model: nn.Module = timm.create_model(
        exported.config["architecture"],
        num_classes=exported.config["num_classes"],
        checkpoint_path=str(exported.model / "model.safetensors"),
        **exported.config["model_args"],
    )
    return model.eval()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("no_gradients")
def test_an_export_is_the_model_that_was_tested(name: str, make: Callable[[str], Exported]) -> None:
    exported = make(name)
    run, model = exported.run(), fl.load_model(exported.model)
    assert not model.training
    pixels, _ = exported.split("validation")
    assert run.experiment.validation is not None
    expected = run.experiment.model(run.experiment.validation.batch(torch.arange(len(pixels))))
    torch.testing.assert_close(model(model.preprocess(pixels)), expected, rtol=1e-5, atol=1e-5)

    result = exported.folder.result
    assert result is not None
    pixels, labels = exported.split("test")
    inputs = model.preprocess(pixels)
    assert_top1(model(inputs), labels, result["test"]["top1"])
    assert len(labels) == result["test"]["count"]
    assert exported.about["loads_in_timm"] == (name not in OF_FEDLENS)
    if exported.about["loads_in_timm"]:
        assert_top1(timm_model(exported)(inputs), labels, result["test"]["top1"])
        assert torch.allclose(timm_model(exported)(inputs), model(inputs), atol=1e-5)


@pytest.mark.parametrize("name", ["batch norm", "vit of timm", "convnext"])
@pytest.mark.usefixtures("no_gradients")
def test_timm_loads_the_folder_by_its_config(name: str, make: Callable[[str], Exported]) -> None:
    exported = make(name)
    model = timm.create_model(f"local-dir:{exported.model}", pretrained=True).eval()
    inputs = fl.load_model(exported.model).preprocess(exported.split("test")[0])
    assert torch.equal(model(inputs), timm_model(exported)(inputs))
    data = timm.data.resolve_model_data_config(model)
    assert list(data["input_size"]) == [3, 32, 32]
    assert (data["interpolation"], data["crop_mode"], data["crop_pct"]) == ("bicubic", "squash", 1)
    assert model.pretrained_cfg["label_names"] == exported.config["label_names"]


@pytest.mark.parametrize(
    ("name", "key"),
    [("central", "head"), ("batch norm", "fc"), ("convnext", "head.fc"), ("vit of timm", "head")],
)
def test_the_head_has_the_name_of_the_classifier(
    name: str, key: str, make: Callable[[str], Exported]
) -> None:
    exported = make(name)
    tensors = load_file(exported.model / "model.safetensors")
    assert torch.equal(tensors[f"{key}.weight"].flatten(1), exported.run().tuned["head.weight"])
    assert exported.config["pretrained_cfg"]["classifier"] == key


@pytest.mark.parametrize(
    "name", ["batch norm", "sparse batch norm", "head on features", "trained head on features"]
)
def test_statistics_of_batch_norm_are_exported(
    name: str, make: Callable[[str], Exported], weights: Path
) -> None:
    tensors, before = load_file(make(name).model / "model.safetensors"), load_file(weights)
    statistics = [key for key in before if "running_" in key]
    assert len(statistics) > 10
    assert all(torch.equal(tensors[key], before[key]) for key in statistics)
    same = [torch.equal(tensors[key], before[key]) for key in before if key != "fc.bias"]
    assert all(same) == ("head" in name)  # a frozen backbone is as it was


def test_a_sparse_run_is_exported_with_the_weights_it_did_not_train(
    make: Callable[[str], Exported],
) -> None:
    exported = make("sparse fedavg")
    run = exported.run()
    tensors = load_file(exported.model / "model.safetensors")
    tuned = {name.removeprefix("backbone."): value for name, value in run.tuned.items()}
    assert tensors.keys() == tuned.keys()
    assert all(torch.equal(tensors[name], tuned[name]) for name in tuned)
    changed = sum(int((run.tuned[name] != run.start[name]).sum()) for name in run.start)
    assert 0 < changed < 0.2 * sum(value.numel() for value in run.start.values())


def test_a_loaded_model_classifies_images_of_any_size(make: Callable[[str], Exported]) -> None:
    exported = make("central")
    model = fl.load_model(str(exported.model))
    pixels = torch.randint(256, (3, 3, 48, 40), dtype=torch.uint8)
    logits = model(model.preprocess(pixels))
    assert logits.shape == (3, len(model.classes)) == (3, 100)
    assert model.classes == dataset(load(exported.folder.config)).classes
    assert model.config == exported.config
    torch.random.manual_seed(1)
    before = torch.random.get_rng_state()
    fl.load_model(exported.model)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_card_says_data_method_accuracy_licence_and_command(
    make: Callable[[str], Exported],
) -> None:
    exported = make("sparse fedavg")
    _, header, text = (exported.model / "README.md").read_text("utf-8").split("---\n", 2)
    facts = yaml.safe_load(header)
    result = exported.folder.result
    assert result is not None
    assert facts["datasets"] == ["synthetic"]
    assert facts["license"] == "unknown"
    assert {"fedlens", "federated-learning"} <= set(facts["tags"])
    (metric,) = facts["model-index"][0]["results"][0]["metrics"]
    assert metric["value"] == result["test"]["top1"]
    for words in (
        f"Test top-1: {result['test']['top1']:.2%}, 95 % interval ", "(Wilson, 200 test images)",
        "One seed", "synthetic benchmark", "5 clients", "FedAvg", "| 0.1 |", "least sensitive",
        "`timm.create_model` cannot build this model", "random weights", "fl.load_model(",
        result["choice"]["parameters"],
    ):  # fmt: skip
        assert words in text, words
    command = text.split("```\nfedlens ")[1].split("\n```")[0]
    word, experiment, *overrides = shlex.split(command)
    assert word == "run"
    again = with_resolution(compose(experiment, overrides))
    assert run_name(again) == exported.folder.name


def test_the_code_on_the_card_works(
    make: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = make("vit of timm")
    shutil.copytree(exported.model, tmp_path / "DIR")
    monkeypatch.chdir(tmp_path)
    text = (exported.model / "README.md").read_text("utf-8")
    of_fedlens, of_timm = (part.split("```")[0] for part in text.split("```python\n")[1:])
    pixels, labels = exported.split("test")
    names: dict[str, Any] = {"pixels": pixels}
    exec(of_fedlens, names)
    result = exported.folder.result
    assert result is not None
    hits = [names["model"].classes.index(word) for word in names["labels"]]
    right = int((torch.tensor(hits) == labels).sum())
    assert right / len(labels) == pytest.approx(result["test"]["top1"])
    logits = names["logits"]
    exec(of_timm, names)
    inputs = fl.load_model("DIR").preprocess(pixels)
    assert torch.allclose(names["model"](inputs), logits, atol=1e-5)


def test_other_seeds_give_an_interval_over_seeds(tmp_path: Path, fedlens: Call) -> None:
    root = f"run.root={tmp_path / 'runs'}"
    quick = [*TINY, *ON_FEATURES, "head=ridge", root]
    first, *_ = [start(compose("quickstart", [*quick, f"seed={seed}"])) for seed in range(3)]
    start(compose("quickstart", [*quick, "head.l2=3"]))  # another method
    code, _, errors = fedlens("export", str(first.path), "--out", str(tmp_path / "model"))
    assert (code, "left out" in errors) == (0, False)
    table = load_runs(tmp_path / "runs")
    same = 100 * table[table["head.l2"] != 3]["test_top1"]
    half = 4.302652729911275 * same.std() / 3**0.5  # Student's quantile for two degrees of freedom
    text = (tmp_path / "model" / "README.md").read_text("utf-8")
    expected = (
        f"3 seeds (0, 1, 2) of the same config: mean test top-1 {same.mean():.2f} % ± {half:.2f}"
    )
    assert expected in text


def test_what_cannot_be_exported_is_refused_in_a_sentence(
    make: Callable[[str], Exported], tmp_path: Path, fedlens: Call
) -> None:
    exported = make("central")

    def refused(words: str, *arguments: str) -> None:
        code, _, errors = fedlens("export", *arguments)
        assert code == 2
        assert words in errors
        assert "Traceback" not in errors

    unfinished = tmp_path / "runs" / "unfinished"
    shutil.copytree(exported.folder.path, unfinished)
    (unfinished / "result.json").unlink()
    refused("is not finished: finish it with", str(unfinished), "--out", str(tmp_path / "x"))
    records = tmp_path / "runs" / "records"
    shutil.copytree(exported.folder.path, records, ignore=shutil.ignore_patterns("checkpoints"))
    refused("There is no checkpoint", str(records), "--out", str(tmp_path / "x"))

    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.tex").write_text("years of work")
    refused("has other content, such as thesis.tex", str(exported.folder.path), "--out", str(full))
    refused("is a file", str(exported.folder.path), "--out", str(full / "thesis.tex"))
    other = make("sparse fedavg")
    refused("has other content", str(exported.folder.path), "--out", str(other.model))
    assert not (tmp_path / "x").exists()
    assert (full / "thesis.tex").read_text() == "years of work"


def test_an_earlier_export_of_the_run_and_an_empty_folder_are_replaced(
    make: Callable[[str], Exported], tmp_path: Path, fedlens: Call
) -> None:
    exported = make("central")
    target = tmp_path / "model"
    target.mkdir()
    for _ in range(2):
        code, printed, _ = fedlens("export", str(exported.folder.path), "--out", str(target))
        assert code == 0
        assert "timm.create_model cannot build this model" in printed
        (target / "README.md").write_text("older")
    fedlens("export", str(exported.folder.path), "--out", str(target))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    for path in target.iterdir():
        assert path.read_bytes() == (exported.model / path.name).read_bytes()


def test_the_page_works_as_printed(
    make: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = make("vit of timm")
    shutil.copytree(exported.folder.path.parent, tmp_path / "runs")
    shutil.copytree(exported.model, tmp_path / "my_model")
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "how-to" / "results.md"
    blocks = [part.split("```")[0] for part in page.read_text("utf-8").split("```python\n")[1:]]
    pixels, _ = exported.split("test")
    names: dict[str, Any] = {"pixels": pixels}
    exec("\n".join(blocks), names)
    result = exported.folder.result
    assert result is not None
    assert names["final"]["mean"].iloc[0] == result["test"]["top1"]
    assert list(names["curves"]["round"]) == [0, 1, 2][-len(names["curves"]) :]
    assert len(names["names"]) == len(pixels)
    inputs = names["model"].preprocess(pixels)
    assert torch.allclose(names["same"].eval()(inputs), names["logits"], atol=1e-5)
