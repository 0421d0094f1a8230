"""The site builds with warnings as errors, fetches nothing, and every command shown can be run."""

import ast
import html
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from functools import cache
from importlib.resources import files as resources
from itertools import takewhile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import typer
import yaml
from mkdocs.exceptions import PluginError

import fedlens as fl
from fedlens import plugins
from fedlens import registry as registry_module
from fedlens.cli import app
from fedlens.config.compose import compose
from fedlens.config.options import PRESETS, groups, header, options
from fedlens.config.schema import ROW_KEYS, keys
from fedlens.registry import REGISTRIES
from fedlens.reporting.study import about
from fedlens.suites import suite

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FENCED = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`]+)`")
SETTING = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)*)=(\S+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(target)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.mark.slow
def test_every_page_of_the_navigation_is_built(site: Path) -> None:
    named = list(_leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]))
    written = {str(page.relative_to(ROOT / "docs")) for page in DOCS}
    assert sorted(named) == sorted(written)
    for name in named:
        assert (site / name).with_suffix(".html").exists()


@pytest.mark.slow
def test_no_page_fetches_anything(site: Path) -> None:
    source = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?(\S+)""")
    urls = {url for page in site.rglob("*.html") for url in source.findall(page.read_text("utf-8"))}
    assert len(urls) > 3
    assert not [url for url in urls if re.match("(https?:)?//", url)]
    styles = [style.read_text("utf-8") for style in site.rglob("*.css")]
    assert not [text for text in styles if re.search(r"(@import|url\()\s*[\"']?https?:", text)]


@pytest.mark.slow
def test_the_reference_lists_every_key_row_option_experiment_suite_and_command(site: Path) -> None:
    pages = {
        name: html.unescape((site / "reference" / f"{name}.html").read_text("utf-8"))
        for name in ("config", "options", "experiments", "suites", "commands", "rows")
    }
    sections = {key.rpartition(".")[0] for key in keys()} - {""}
    for kind, registry in REGISTRIES.items():
        assert f'id="{kind}"' in pages["rows"]
        for row in registry:
            assert f"<code>{row.name}</code>" in pages["rows"]
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


@pytest.mark.slow
def test_a_key_is_explained_by_its_comment_or_by_the_row_that_reads_it(site: Path) -> None:
    page = html.unescape((site / "reference" / "config.html").read_text("utf-8"))
    rows = {
        row[0]: row[1:] for row in re.findall(r"<td>(.*?)</td>\s*" * 4, page) if "<code>" in row[0]
    }
    assert rows["<code>data.validation</code>"] == (
        "float",
        "<code>0.1</code>",
        "fraction of the training images held out, stratified; in [0, 1)",
    )
    assert rows["<code>sparse.density</code>"][:2] == ("float or null", "<code>null</code>")
    aggregators = rows["<code>algorithm.aggregator.name</code>"][2]
    assert aggregators.startswith("mean | fednova")
    assert rows["<code>partition.classes_per_client</code>"] == (
        "int",
        "<code>10</code>",
        "classes that each client holds; 1 or more (of classes)",
    )


@pytest.mark.slow
def test_the_reference_lists_every_row_with_its_parameters_and_paper(site: Path) -> None:
    page = html.unescape((site / "reference" / "rows.html").read_text("utf-8"))
    for kind, registry in REGISTRIES.items():
        section = page[page.index(f'<h2 id="{kind}">') :].partition("<h2")[2].partition("<h2")[0]
        for row in registry:
            assert f"<code>{row.name}</code>" in section, row.name
            for parameter in row.parameters:
                assert f"<code>{parameter.name}: " in section, (row.name, parameter.name)
            for url in re.findall(r"https?://\S+", row.paper):
                assert f'href="{url}"' in section, row.name


@pytest.mark.slow
def test_the_reference_of_the_library_has_every_public_name(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text("utf-8")
    for name, defined in fl._PUBLIC.items():
        if name in REGISTRIES:
            assert f"<code>fl.{name}</code>" in page
        else:
            assert f'id="{defined.replace(":", ".")}"' in page, name
    assert "&gt;&gt;&gt; " not in re.sub(r"<pre.*?</pre>", "", page, flags=re.DOTALL)


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_reference_is_made_without_torch() -> None:
    code = "import sys, generated; list(map(list, (row() for row in generated.TABLE.values())));"
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "docs" / "hooks", check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.usefixtures("rows_of_the_examples")
def test_every_command_that_is_shown_can_be_run(page: Path) -> None:
    text = page.read_text("utf-8")
    for block in FENCED.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if line.lstrip("! ").startswith("fedlens "):
                _check_line(shlex.split(line.lstrip("! "), comments=True))
    for code in CODE.findall(FENCED.sub("", text)):
        if code.startswith("fedlens "):
            _check_line(shlex.split(code), complete=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.usefixtures("rows_of_the_examples")
def test_every_setting_that_is_shown_exists(page: Path) -> None:
    """`key=value` outside of commands: the key exists, and the row or preset it chooses too."""
    for code in CODE.findall(FENCED.sub("", page.read_text("utf-8"))):
        settings = [SETTING.fullmatch(word) for word in code.split()]
        if all(settings):
            for setting in filter(None, settings):
                _check_setting(*setting.groups())


@pytest.mark.slow
def test_every_command_of_a_notebook_can_be_run() -> None:
    count = 0
    for notebook in NOTEBOOKS:
        values: dict[str, str] = {}
        for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] != "code" or "%" in source:
                continue
            for node in ast.parse(source).body:
                if isinstance(node, ast.Assign):
                    values[ast.unparse(node.targets[0])] = _text(node.value, values)
                elif (call := _call_of_fedlens(node)) is not None:
                    words = " ".join(_text(argument, values) for argument in call.args)
                    _check_line(["fedlens", *shlex.split(words)])
                    count += 1
    assert count > 15


def test_every_command_of_the_makefile_can_be_run() -> None:
    lines = (ROOT / "Makefile").read_text("utf-8").splitlines()
    commands = [line.partition("$(BIN)/")[2] for line in lines if "$(BIN)/fedlens " in line]
    assert len(commands) > 3
    for command in commands:
        _check_line(shlex.split(re.split(r"   |\"", command)[0]))


def test_every_command_of_a_preset_or_a_help_text_can_be_run() -> None:
    commands = []
    for kind in ("experiment", "suite"):
        for name in options(kind):
            text = resources(PRESETS).joinpath(kind, f"{name}.yaml").read_text("utf-8")
            commands += re.findall(r"^(?:command:)? +(fedlens .*)", header(text), re.MULTILINE)
    for command in _helps(typer.main.get_command(app)):
        commands += [code for code in CODE.findall(command) if code.startswith("fedlens ")]
    assert len(commands) > 50
    for command in commands:
        _check_line(shlex.split(command.partition("   ")[0]), complete=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_source_file_that_is_named_exists(page: Path) -> None:
    for code in CODE.findall(FENCED.sub("", page.read_text("utf-8"))):
        if re.fullmatch(r"[\w/]+/\w+\.py", code):
            folders = (ROOT, ROOT / "src", ROOT / "src" / "fedlens")
            assert any((folder / code).exists() for folder in folders), code


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
            _check(wrong.split(), complete=True)


def test_a_setting_that_does_not_exist_is_noticed() -> None:
    for wrong in ("train.learning_rate=1", "algorithm=turns", "algorithm.aggregator=tise"):
        with pytest.raises(AssertionError):
            _check_setting(*wrong.split("="))


def _check_line(words: list[str], *, complete: bool = True) -> None:
    for alternative in _alternatives(words):
        _check(alternative, complete=complete and "|" not in words)


def _check_setting(key: str, value: str) -> None:
    if not key.startswith(tuple(one.partition(".")[0] for one in keys())):
        return  # an argument of a function, or an environment variable
    known = {*keys(), "experiment"}
    assert key in known or "." not in key, key
    if key not in known or value.isupper() or "…" in value:
        return  # an argument of a function, or a placeholder
    choices = set(options(key)) if key in groups() else set()
    if key in ROW_KEYS:
        registry = REGISTRIES[ROW_KEYS[key]]
        if registry.get(value) or registry.chosen(value)["name"] != value:
            return  # a row, or a row and its argument
    choices |= set(REGISTRIES[ROW_KEYS[key]].names) if key in ROW_KEYS else set()
    assert not choices or value in choices, f"{key}={value}"


def _check(words: list[str], *, complete: bool) -> None:
    """Parses as the command would, and composes the config; a complete line lacks no argument."""
    command: Any = _command_line()
    path, rest = ["fedlens"], [word for word in words[1:] if word != "…"]
    while rest and hasattr(command, "commands"):
        command = command.commands.get(rest[0])
        assert command is not None or rest[0] == "COMMAND", f"no command {' '.join(words)}"
        if command is None:
            return
        path, rest = [*path, rest[0]], rest[1:]
    if (not rest and not complete) or hasattr(command, "commands"):
        return  # the name of a command, in a sentence
    arguments = command.make_context(" ".join(path), rest).params
    overrides = arguments.get("overrides") or []
    if path[1] == "suite" and arguments["name"]:
        name = arguments["name"]
        assert name.endswith(".yaml") or name.isupper() or name in options("suite"), words
        _composed("fedavg_noniid", *overrides)
    elif path[1] == "config" and arguments["experiment"] == "rows":
        assert set(overrides) <= {*REGISTRIES, *ROW_KEYS, "KIND"}, words
    elif arguments.get("experiment"):
        name = arguments["experiment"]
        known = "centralized" if name.endswith(".yaml") or name.isupper() else name
        _composed(known, *overrides)
    for searched in arguments.get("search") or []:
        assert searched.partition("=")[0] in keys(), words


@cache
def _command_line() -> Any:
    return typer.main.get_command(app)


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


def _helps(command: Any) -> Iterator[str]:
    yield inspect.cleandoc(command.help or "")
    for one in getattr(command, "commands", {}).values():
        yield from _helps(one)


def _call_of_fedlens(node: ast.stmt) -> ast.Call | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        if isinstance(call.func, ast.Name) and call.func.id == "fedlens":
            return call
    return None


def _text(node: ast.expr, values: dict[str, str]) -> str:
    """A string of a notebook with the values of its variables."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, values) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return values[ast.unparse(node.value)]
    assert isinstance(node, ast.Constant)
    return str(node.value)


def _python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def rows_of_the_examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rows that docs/how-to/extend.md and README.md add, as those of a file mine.py."""
    before = {kind: dict(registry.added) for kind, registry in REGISTRIES.items()}
    blocks = _python_blocks(ROOT / "docs" / "how-to" / "extend.md")
    blocks += _python_blocks(ROOT / "README.md")[1:]  # the first is of the library
    mine = types.ModuleType("mine")
    exec("\n".join(blocks), mine.__dict__)
    monkeypatch.setitem(sys.modules, "mine", mine)
    monkeypatch.setattr(registry_module, "load_plugin", lambda path: None)
    monkeypatch.setattr(plugins, "_imported", dict(plugins._imported))  # what names rows of `mine`
    yield
    for kind, registry in REGISTRIES.items():
        registry.added = before[kind]


@pytest.fixture(scope="module")
def hooks() -> dict[str, ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "hooks")
        import generated
        import maths

        return {"maths": maths, "generated": generated}


def _read(hook: ModuleType, markdown: str) -> str:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"), meta={})
    rendered: str = hook.on_page_markdown(markdown, page=page, config=None, files=None)
    return rendered


@pytest.mark.parametrize("kind", ["experiment", "suite"])
def test_the_overview_names_every_experiment_and_every_suite(kind: str) -> None:
    text = (ROOT / "docs" / "reference" / f"{kind}s.md").read_text(encoding="utf-8")
    parts = ("quick_", "quickstart_rules")  # of quick, and named under Measurements
    assert [
        name
        for name in options(kind)
        if f"{name}`" not in text and f" {name} " not in text and not name.startswith(parts)
    ] == []


def test_the_tutorial_links_its_terms_to_the_glossary() -> None:
    known = re.findall(r"^## (.+)$", (ROOT / "docs" / "glossary.md").read_text("utf-8"), re.M)
    assert 12 <= len(known) <= 40
    linked = set()
    for page in (ROOT / "docs" / "tutorial").glob("*.md"):
        linked |= set(re.findall(r"glossary\.md#([\w-]+)", page.read_text("utf-8")))
    assert len(linked) >= 12


def test_the_library_example_of_the_readme_runs() -> None:
    block = _python_blocks(ROOT / "README.md")[0]
    assert len(block.splitlines()) <= 12
    inputs = torch.randn(600, 4)
    world: dict[str, Any] = {
        "images": inputs,
        "labels": torch.arange(600) % 10,
        "model": torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10)
        ),
    }
    exec(block, world)
    assert world["state"].round == 10
