"""Every example in a docstring runs, and every public name has one."""

import ast
import doctest
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlens as fl
from fedlens.registry import REGISTRIES

SOURCE = Path(fl.__file__).parent
OPTIONS = doctest.NORMALIZE_WHITESPACE


def modules() -> list[str]:
    """All that have an example, read without importing the others."""
    return [
        ".".join(("fedlens", *path.relative_to(SOURCE).with_suffix("").parts))
        for path in sorted(SOURCE.rglob("*.py"))
        if ">>> " in path.read_text("utf-8")
    ]


def run(test: doctest.DocTest) -> None:
    lines: list[str] = []
    with torch.random.fork_rng(devices=()):
        doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=lines.append)
    assert not lines, "".join(lines)


def test_there_are_examples_to_run() -> None:
    assert len(modules()) > 10


@pytest.mark.parametrize("name", modules())
def test_the_examples_of_a_module(name: str) -> None:
    tests = doctest.DocTestFinder(exclude_empty=True).find(import_module(name))
    for test in tests:
        run(test)


@pytest.mark.parametrize("kind", REGISTRIES)
def test_the_example_that_adds_a_row(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user writes it: in a module of one's own; the row is gone afterwards."""
    for registry in REGISTRIES.values():
        monkeypatch.setattr(registry, "added", {})
    doc = REGISTRIES[kind].__doc__ or ""
    run(doctest.DocTestParser().get_doctest(doc, {"__name__": "mine"}, kind, None, 0))
    assert len(REGISTRIES[kind].added) == 1


@pytest.mark.parametrize("name", [name for name in fl.__all__ if name != "__version__"])
def test_every_public_name_has_an_example_that_runs_as_it_is_printed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the imports that it needs, so that it can be copied from the docs."""
    for registry in REGISTRIES.values():
        monkeypatch.setattr(registry, "added", {})
    doc = inspect.getdoc(getattr(fl, name)) or ""
    assert doc.partition("\n\n")[0].endswith("."), doc
    assert "\nExamples:\n    >>> import " in doc
    run(doctest.DocTestParser().get_doctest(doc, {"__name__": "mine"}, name, None, 0))


FUNCTIONS = [name for name in fl.__all__ if inspect.isfunction(getattr(fl, name))]


@pytest.mark.parametrize("name", [*FUNCTIONS, "SparseSGDM", "SparseAdamW"])
def test_the_arguments_are_explained_in_their_order(name: str) -> None:
    doc = inspect.getdoc(getattr(fl, name)) or ""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, re.MULTILINE | re.DOTALL)
    assert section is not None
    explained = re.findall(r"^ {4}\**(\w+): \S", section[1], re.MULTILINE)
    assert explained == list(inspect.signature(getattr(fl, name)).parameters)


def test_kinds_of_rows_are_called_what_they_are() -> None:
    assert {name for name in fl.__all__ if getattr(fl, name) in registries()} == set(REGISTRIES)


def registries() -> list[Any]:
    return list(REGISTRIES.values())


def test_examples_are_found_in_every_file_that_shows_one() -> None:
    """Doctest looks only at docstrings: an example elsewhere would never run."""
    for name in modules():
        path = SOURCE.joinpath(*name.split(".")[1:]).with_suffix(".py")
        tree = ast.parse(path.read_text("utf-8"))
        shown = sum(doc.count(">>> ") for doc in _docstrings(tree))
        documented = sum(registry.__doc__.count(">>> ") for registry in registries()
                         if name == "fedlens.registry")  # fmt: skip
        assert path.read_text("utf-8").count(">>> ") == shown + documented


def _docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""
