"""The command line without runs: rows, their parameters, numbers, and how fast it starts."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

import fedlens
from fedlens.cli import app
from fedlens.cli.commands.arithmetic import _merge_methods
from fedlens.cli.numbers import assignment
from fedlens.cli.shared import out
from fedlens.errors import FedlensError
from fedlens.registry import REGISTRIES, merge_method

HEAVY = {"torch", "matplotlib", "hydra", "omegaconf", "pandas", "scipy", "optuna"}


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    typer.main.get_command(app).main(list(words), standalone_mode=False)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--help"], ["ls"], ["ls", "--json"], ["ls", "--csv"], ["config", "rows"]]
)
def test_light_commands_import_nothing_heavy(words: list[str]) -> None:
    program = (
        f"import sys; sys.argv = ['fedlens', *{words!r}]\n"
        "from fedlens.cli import app\n"
        "try:\n    app()\nexcept SystemExit:\n    pass\n"
        f"print(sorted({HEAVY!r} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command and group, by the words that call it."""
    command = command or typer.main.get_command(app)
    yield " ".join(path), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


def test_every_command_argument_and_option_has_a_help_text() -> None:
    for words, command in commands():
        assert command.help, words
        for parameter in command.params:
            assert parameter.help, f"{words}: {parameter.name}"


@pytest.mark.slow
def test_help_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words, _ in commands():
        text = printed(capsys, *words.split(), "--help")
        assert all(len(line.rstrip()) <= 80 for line in text.splitlines()), words
    assert "--install-completion" in printed(capsys, "--help")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--version") == f"fedlens {fedlens.__version__}\n"


def test_experiments_and_suites_are_listed_with_their_fields(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out, "_width", 80)
    for command, name in (("config", "centralized"), ("suite", "mask_rules")):
        text = printed(capsys, command)
        assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
        assert f"\n{name}\n" in f"\n{text}"
        assert text.count("\ncommand: fedlens ") == text.count("\ncost:    ") > 10


def test_rows_are_listed_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "config", "rows")
    for kind, registry in REGISTRIES.items():
        assert kind in text
        assert all(name in text for name in registry.names)
    assert "algorithm.aggregator=NAME" in text


def test_rows_of_a_kind_show_labels_parameters_and_papers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, "config", "rows", "merge_method")
    for row in merge_method:
        assert f"{row.name}  ({row.label})" in text
        assert row.paper in text
        assert all(f"{one.name}: {one.type_name}" in text for one in row.parameters)
    assert printed(capsys, "config", "rows", "partition") == printed(
        capsys, "config", "rows", "partitioner"
    )
    with pytest.raises(FedlensError, match="did you mean 'aggregator'"):
        printed(capsys, "config", "rows", "agregator")


def test_merge_methods_take_the_parameters_they_read() -> None:
    plain = _merge_methods(["ties", "dare"], [])
    assert plain == {
        name: {k: v for k, v in merge_method[name].defaults.items() if k != "scale"}
        for name in ("ties", "dare")
    }
    changed = _merge_methods(["ties", "dare", "average"], ["density=0.5", "dare.density=1"])
    assert changed == {"ties": {"density": 0.5}, "dare": {"density": 1.0}, "average": {}}


@pytest.mark.parametrize(
    ("methods", "word", "message"),
    [
        (["tie"], "density=0.5", "did you mean 'ties'"),
        (["ties"], "density=0", r"ties.density=0.* must be in"),
        (["ties"], "outliers=0.1", "is not read by ties: "),
        (["average"], "density=0.1", "they have no parameters"),
        (["ties"], "scale=2", "is not read by ties"),
        (["ties"], "density", "KEY=VALUE"),
    ],
)
def test_other_parameters_are_refused(methods: list[str], word: str, message: str) -> None:
    with pytest.raises(FedlensError, match=message):
        _merge_methods(methods, [word])


def test_values_of_a_command_line() -> None:
    words = ["a=1", "a=1e-3", "a=true", "a=null", "a=text", "a=b=c"]
    values = [assignment(word, "--parameter")[1] for word in words]
    assert values == [1, 0.001, True, None, "text", "b=c"]
