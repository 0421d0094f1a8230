"""The site builds with warnings as errors, fetches nothing, and every command shown can be run."""

import html
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer
import yaml
from mkdocs.exceptions import PluginError

from fedlens.cli import app
from fedlens.config.compose import compose
from fedlens.config.options import groups, options
from fedlens.config.schema import keys
from fedlens.reporting.study import about
from fedlens.suites import suite

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
FENCED = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(fedlens [^`]+)`")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(target)]
    told = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_every_page_of_the_navigation_is_built(site: Path) -> None:
    named = list(_leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]))
    written = {str(page.relative_to(ROOT / "docs")) for page in PAGES[:-1]}
    assert sorted(named) == sorted(written)
    for name in named:
        assert (site / name).with_suffix(".html").exists()


def test_no_page_fetches_anything(site: Path) -> None:
    asked = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?(\S+)""")
    found = {url for page in site.rglob("*.html") for url in asked.findall(page.read_text("utf-8"))}
    assert len(found) > 3
    assert not [url for url in found if re.match("(https?:)?//", url)]
    styles = [style.read_text("utf-8") for style in site.rglob("*.css")]
    assert not [text for text in styles if re.search(r"(@import|url\()\s*[\"']?https?:", text)]


def test_the_reference_lists_every_key_option_experiment_suite_and_command(site: Path) -> None:
    pages = {
        name: html.unescape((site / "reference" / f"{name}.html").read_text("utf-8"))
        for name in ("config", "options", "experiments", "suites", "commands")
    }
    sections = {key.rpartition(".")[0] for key in keys()} - {""}
    for key in keys():
        sought = f'id="{key.replace(".", "")}"' if key in sections else f"<code>{key}</code>"
        assert sought in pages["config"], key
    for group in set(groups()) - {"experiment"}:
        for option in options(group):
            assert f"<code>{group}={option}</code>" in pages["options"]
    for kind in ("experiment", "suite"):
        for name in options(kind):
            assert f'<h2 id="{name}">' in pages[f"{kind}s"]
    for path in _commands("fedlens", typer.main.get_command(app)):
        assert f">{path}<" in pages["commands"]


def test_a_key_is_explained_by_the_comment_behind_it_and_the_lines_below(site: Path) -> None:
    page = html.unescape((site / "reference" / "config.html").read_text("utf-8"))
    rows = {
        row[0]: row[1:] for row in re.findall(r"<td>(.*?)</td>\s*" * 4, page) if "<code>" in row[0]
    }
    assert rows["<code>data.validation</code>"] == (
        "float",
        "<code>0.1</code>",
        "fraction of the training images, stratified",
    )
    assert rows["<code>sparse.density</code>"][:2] == ("float, null", "<code>null</code>")
    told = rows["<code>algorithm.aggregator</code>"][2]
    assert told.startswith("or clipped_mean")
    assert told.endswith("breadcrumbs, consensus")  # on the line below


def test_formulas_are_mathml_when_they_arrive(site: Path) -> None:
    page = (site / "concepts" / "observing.html").read_text("utf-8")
    assert page.count("<math") > 10
    text = re.sub(r"<(script|code)\b.*?</\1>", "", page, flags=re.DOTALL)
    assert "$" not in text
    assert "\\" not in text


def test_a_formula_that_is_unknown_or_not_ended_is_an_error(hooks: dict[str, ModuleType]) -> None:
    mathml = hooks["maths"].mathml
    assert "<mfrac>" in mathml(r"\frac{a}{b}")
    for wrong in (r"\nosuchcommand{x}", "x^{"):
        with pytest.raises(PluginError):
            mathml(wrong)
    for wrong in ("it costs 5 $.", "# A heading with $x$"):
        with pytest.raises(PluginError):
            _read(hooks["maths"], wrong)


def test_dollars_in_code_are_no_formulas(hooks: dict[str, ModuleType]) -> None:
    text = "Set `$HOME`:\n\n```\necho $HOME $PATH\n```\n"
    assert _read(hooks["maths"], text) == text


def test_a_key_or_a_generator_that_does_not_exist_is_an_error(hooks: dict[str, ModuleType]) -> None:
    fine = "`train.lr=0.1`, `partition.png` and `os.path` may stand in a page."
    assert _read(hooks["generated"], fine) == fine
    for wrong in ("`train.learning_rate`", "`sparse.sparsity=0.9`", "<!-- generated: nothing -->"):
        with pytest.raises(PluginError):
            _read(hooks["generated"], wrong)


def test_the_reference_is_made_without_torch() -> None:
    code = "import sys, generated; list(map(list, (row() for row in generated.TABLE.values())));"
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "docs" / "hooks", check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_that_is_shown_can_be_run(page: Path) -> None:
    text = page.read_text("utf-8")
    for block in FENCED.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if line.lstrip("! ").startswith("fedlens "):
                told = shlex.split(line.lstrip("! "), comments=True)
                for words in _alternatives(told):
                    _check(words, whole="|" not in told)
    for line in INLINE.findall(FENCED.sub("", text)):
        for words in _alternatives(shlex.split(line)):
            _check(words, whole=False)


def test_the_files_that_are_shown_are_what_they_are_said_to_be(tmp_path: Path) -> None:
    shown = {"suites": tmp_path / "grid.yaml", "report": tmp_path / "about.yaml"}
    for name, path in shown.items():
        page = (ROOT / "docs" / "how-to" / f"{name}.md").read_text("utf-8")
        path.write_text(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0], "utf-8")
    assert len(suite.find(str(shown["suites"])).cells([], seeds=1)) == 4
    assert about.read(shown["report"]).authors[0].name == "Ada Example"


def test_a_command_that_cannot_be_run_is_noticed() -> None:
    for wrong in (
        "fedlens rum centralized",
        "fedlens run centralised",
        "fedlens run centralized train.learning_rate=1",
        "fedlens run centralized backbone=vit_huge",
        "fedlens run centralized --fast",
        "fedlens run",
        "fedlens suite nosuchsuite",
        "fedlens suite mask_rules trian.lr=1",
    ):
        with pytest.raises(Exception):  # noqa: B017
            _check(wrong.split(), whole=True)


def _check(words: list[str], *, whole: bool) -> None:
    """Parses as the command would, and composes what it names; `whole` lines lack no argument."""
    command: Any = typer.main.get_command(app)
    path, rest = ["fedlens"], [word for word in words[1:] if word != "…"]
    while rest and hasattr(command, "commands"):
        command = command.commands.get(rest[0])
        assert command is not None or rest[0] == "COMMAND", f"no command {' '.join(words)}"
        if command is None:
            return
        path, rest = [*path, rest[0]], rest[1:]
    if (not rest and not whole) or hasattr(command, "commands"):
        return  # the name of a command, in a sentence
    asked = command.make_context(" ".join(path), rest).params
    overrides = asked.get("overrides") or []
    if path[1] == "suite" and asked["which"]:
        name = asked["which"]
        assert name.endswith(".yaml") or name.isupper() or name in options("suite"), words
        _composed("fedavg_noniid", *overrides)
    elif asked.get("experiment"):
        name = asked["experiment"]
        known = "centralized" if name.endswith(".yaml") or name.isupper() else name
        _composed(known, *overrides)
    for searched in asked.get("search") or []:
        assert searched.partition("=")[0] in keys(), words


@cache
def _composed(experiment: str, *overrides: str) -> None:
    compose(experiment, list(overrides))


def _alternatives(words: list[str]) -> Iterator[list[str]]:
    """`data fetch | verify NAME` is two commands: of words joined by bars each stands by itself."""
    if "|" not in words:
        yield words
        return
    first = words.index("|") - 1
    joined = list(takewhile(lambda at: words[at] == "|", range(first + 1, len(words), 2)))
    for choice in (first, *(at + 1 for at in joined)):
        yield [*words[:first], words[choice], *words[joined[-1] + 2 :]]


def _leaves(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for inside in entry.values() if isinstance(entry, dict) else entry:
        if not isinstance(entry, str):
            yield from _leaves(inside)


def _commands(path: str, command: Any) -> Iterator[str]:
    if not hasattr(command, "commands"):
        yield path
        return
    for name, one in command.commands.items():
        yield from _commands(f"{path} {name}", one)


@pytest.fixture(scope="module")
def hooks() -> dict[str, ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "hooks")
        import generated
        import maths

        return {"maths": maths, "generated": generated}


def _read(hook: ModuleType, markdown: str) -> str:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"), meta={})
    found: str = hook.on_page_markdown(markdown, page=page, config=None, files=None)
    return found


def test_readme_tells_of_every_experiment_and_every_suite() -> None:
    told = (ROOT / "README.md").read_text(encoding="utf-8")
    names = [*options("experiment"), *options("suite")]
    parts = ("quick_", "quickstart_rules")  # of quick, and named under Measured
    assert [n for n in names if f"{n}`" not in told and f" {n} " not in told
            and not n.startswith(parts)] == []  # fmt: skip
