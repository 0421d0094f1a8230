"""Reference pages from the code itself, so that they cannot differ from it. Torch is not loaded.

A line `<!-- generated: NAME -->` of a page is replaced by what the row NAME of `TABLE` writes; a
config key that a page names and the schema does not know is an error.
"""

import ast
import html
import inspect
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from importlib.resources import files as resources
from pathlib import Path
from typing import Any, get_type_hints

import typer
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from fedlens.cli import app
from fedlens.config import options
from fedlens.config.schema import ROW_KEYS, RUNTIME_KEYS, Config, keys, parameters
from fedlens.registry import REGISTRIES, REQUIRED, Parameter

MARKER = re.compile(r"^<!-- generated: (.+) -->$", re.MULTILINE)
NAMED = re.compile(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:=[^`]*)?`")
FILES = (".json", ".jsonl", ".png", ".py", ".yaml", ".safetensors", ".md", ".db", ".csv", ".tex")

NARROW = '<div class="narrow" markdown>\n\n'  # a table whose rows become blocks on a phone
HEADER = NARROW + "| key | type | default | meaning |\n|---|---|---|---|"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    del config, files
    known, groups = set(keys()), set(options.groups()) | {"federated", "sparse", "evaluate"}
    for name in NAMED.findall(markdown):
        if name.partition(".")[0] in groups and not name.endswith(FILES) and name not in known:
            raise PluginError(f"{page.file.src_uri}: there is no config key {name}")
    return MARKER.sub(lambda found: _generate(found[1], page), markdown)


def _generate(name: str, page: Page) -> str:
    if name not in TABLE:
        raise PluginError(f"{page.file.src_uri}: nothing generates '{name}'")
    return "\n".join(TABLE[name]())


def config_keys() -> Iterator[str]:
    listed: list[str] = []
    yield from _section(Config, "", "", listed)
    if missing := set(keys()) ^ set(listed):
        raise PluginError(f"The reference and the schema differ in {', '.join(sorted(missing))}")


def _section(schema: type, prefix: str, comment: str, listed: list[str]) -> Iterator[str]:
    """A heading and a table for the keys of a dataclass, then the same for those inside it."""
    hints, comments = get_type_hints(schema), _comments(schema)
    name = prefix.removesuffix(".")
    yield f"\n{'###' if '.' in name else '##'} {name or 'The whole'}\n"
    if schema is not Config and schema.__doc__ and not schema.__doc__.startswith(schema.__name__):
        yield f"{_text(schema.__doc__)}\n"
    yield from _notes(name, comment)
    inside: list[Iterator[str]] = []
    lines = []
    for entry in fields(schema):
        hint, key = hints[entry.name], prefix + entry.name
        listed.append(key)
        if key in ROW_KEYS:
            inside.append(_row_section(key, entry.default, comments.get(entry.name, ""), listed))
        elif is_dataclass(hint):
            inside.append(_section(hint, f"{key}.", comments.get(entry.name, ""), listed))
        else:
            one = replace(parameters()[key], help=comments.get(entry.name, ""))
            lines.append(_line(key, one.type_name, one.default, _meaning(one)))
    if lines:
        yield HEADER
        yield from lines
        yield "\n</div>\n"
    for section in inside:
        yield from section


def _row_section(key: str, default: str, comment: str, listed: list[str]) -> Iterator[str]:
    """A heading and a table for a key that chooses a row: its name and all rows' parameters."""
    kind = ROW_KEYS[key]
    registry = REGISTRIES[kind]
    yield f"\n{'###' if '.' in key else '##'} {key}\n"
    yield from _notes(key, comment)
    yield (f"A row of the kind [{kind}](rows.md#{kind}), chosen by `{key}=NAME`. A parameter that "
           "the chosen row does not read is refused.\n")  # fmt: skip
    yield HEADER
    yield _line(f"{key}.name", "str", default, " | ".join(registry.names))
    lines: dict[tuple[str, str], list[str]] = {}
    for row in registry:
        for one in row.parameters:
            line = _line(f"{key}.{one.name}", one.type_name, one.default, _meaning(one))
            lines.setdefault((one.name, line), []).append(row.name)
    for (name, line), rows in sorted(lines.items()):
        of = "" if len(rows) == len(registry.names) else f"(of {', '.join(rows)})"
        yield f"{line.removesuffix(' |')} {_text(of)} |"
        listed.append(f"{key}.{name}")
    yield "\n</div>\n"
    listed.append(f"{key}.name")


def _notes(name: str, comment: str) -> Iterator[str]:
    if comment:
        yield f"{_text(comment)[0].upper()}{_text(comment)[1:]}.\n"
    if name in options.groups():
        listing = ", ".join(f"`{name}={option}`" for option in options.options(name))
        yield f"Options, each [a file](options.md#{name}): {listing}.\n"
    if name in RUNTIME_KEYS:
        yield "Says where and how to run, not what to learn: it does not make another run.\n"


def _line(key: str, kind: str, default: Any, meaning: str) -> str:
    shown = "required" if default is REQUIRED else f"`{_yaml(default)}`"
    text = _text(meaning)
    if key in RUNTIME_KEYS:
        text = f"{text} (does not make another run)".strip()
    return f"| `{key}` | {_text(kind)} | {shown} | {text} |"


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _meaning(one: Parameter) -> str:
    return "; ".join(filter(None, (one.help, str(one.range or ""))))


def rows() -> Iterator[str]:
    """Every kind of row: what its rows are called with, an example, and the package's own rows."""
    for kind, registry in REGISTRIES.items():
        text, _, example = inspect.cleandoc(registry.__doc__ or "").partition("Examples:\n")
        yield f"\n## {kind}\n\n{text.strip()}\n"
        chosen = ", ".join(f"[`{key}`](config.md#{key.replace('.', '')})"
                           for key, one in ROW_KEYS.items() if one == kind)  # fmt: skip
        if chosen:
            yield f"Config key: {chosen}.\n"
        yield f"```pycon\n{inspect.cleandoc(example)}\n```\n"
        yield NARROW + "| name | label | parameters | paper |\n|---|---|---|---|"
        for row in registry:
            parameters = "<br>".join(map(_parameter, row.parameters))
            yield (f"| `{row.name}`<br>{_text(row.doc)} | {_text(row.label)} | {parameters} "
                   f"| {_linked(row.paper)} |")  # fmt: skip
        yield "\n</div>\n"


def _parameter(one: Parameter) -> str:
    default = "" if one.default is REQUIRED else f" = {_yaml(one.default)}"
    meaning = _meaning(one)
    return f"`{one.name}: {one.type_name}{default}`" + (f" {_text(meaning)}" if meaning else "")


def _linked(paper: str) -> str:
    """`Authors, year, URL` as a link."""
    names, _, url = paper.rpartition(" ")
    return f"[{_text(names.rstrip(','))}]({url})" if names else _text(paper)


def _comments(schema: type) -> dict[str, str]:
    """What stands behind the fields of a dataclass, and on comment lines right below them."""
    source = inspect.getsource(schema)
    lines = source.splitlines()
    behind = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            line = node.end_lineno or node.lineno
            words = [behind[line]] if line in behind else []
            while words and line < len(lines) and lines[line].lstrip().startswith("#"):
                line += 1
                words.append(behind[line])
            found[node.target.id] = " ".join(words)
    return found


def documents(group: str) -> Iterator[str]:
    """The experiments or suites: what the header of each file says, and the file."""
    for name in options.options(group):
        text = resources(options.PRESETS).joinpath(group, f"{name}.yaml").read_text("utf-8")
        said = _fields(options.header(text))
        yield f"\n## {name}\n\n{_text(said.pop('', ''))}\n"
        if command := said.pop("command", ""):
            yield f"```\n{command}\n```\n"
        for word, sentence in said.items():
            yield f"{word.capitalize()}\n:   {_text(sentence)}\n"
        body = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
        indented = "\n".join(f"    {line}" for line in body.strip().splitlines())
        yield f'??? note "{group}/{name}.yaml"\n\n    ```yaml\n{indented}\n    ```\n'


def _fields(header: str) -> dict[str, str]:
    """`cost: …` and its indented lines as {'cost': …}; what comes first is under ''."""
    found: dict[str, list[str]] = {"": []}
    word = ""
    for line in header.splitlines():
        if start := re.match(r"([a-z]+): +(.*)", line):
            word, line = start[1], start[2]
            found[word] = []
        found[word].append(line.strip())
    joined = {word: ("\n" if word == "command" else " ").join(ls) for word, ls in found.items()}
    return {word: text.strip() for word, text in joined.items()}


def option_files() -> Iterator[str]:
    for group in options.groups():
        if group == "experiment":
            continue
        yield f"\n## {group}\n"
        for option in options.options(group):
            text = resources(options.PRESETS).joinpath(group, f"{option}.yaml").read_text("utf-8")
            yield f"`{group}={option}`\n\n```yaml\n{text.strip()}\n```\n"


def commands() -> Iterator[str]:
    yield from _command("fedlens", typer.main.get_command(app))


def _command(path: str, command: Any) -> Iterator[str]:
    inside = getattr(command, "commands", None)
    said = inspect.cleandoc(command.help or "")
    if inside is None or path != "fedlens":
        yield f"\n{'##' if path.count(' ') == 1 else '###'} {path}\n\n{said}\n"
    if inside is not None:
        for name, one in inside.items():
            yield from _command(f"{path} {name}", one)
        return
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    words = [_shown(one) for one in arguments]
    options = [p for p in command.params if p.param_type_name == "option"]
    yield f"```\n{' '.join([path, *words, *(['[OPTIONS]'] if options else [])])}\n```\n"
    if not command.params:
        return
    yield NARROW + "| | default | meaning |\n|---|---|---|"
    for one in command.params:
        name = _shown(one) if one in arguments else ", ".join([*one.opts, *one.secondary_opts])
        default = getattr(one, "show_default", None)
        shown = default if isinstance(default, str) else one.default
        plain = isinstance(shown, str | int | float | Path) and not isinstance(shown, bool)
        yield f"| `{name}` | {f'`{shown}`' if plain else ''} | {_text(one.help or '')} |"
    yield "\n</div>\n"


def _shown(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _text(words: str) -> str:
    """Safe in a Markdown table; `code` stays code."""
    parts = re.split(r"(`[^`]*`)", " ".join(words.split()))
    escaped = (part if part.startswith("`") else _escaped(part) for part in parts)
    return "".join(escaped).replace("|", r"\|")


def _escaped(text: str) -> str:
    return re.sub(r"([*_])", r"\\\1", html.escape(text, quote=False))


TABLE: dict[str, Callable[[], Iterator[str]]] = {
    "keys": config_keys,
    "rows": rows,
    "experiments": partial(documents, "experiment"),
    "suites": partial(documents, "suite"),
    "options": option_files,
    "commands": commands,
}
