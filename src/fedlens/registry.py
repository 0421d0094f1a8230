"""One registry for all that can be chosen by name: functions, their parameters, labels and papers.

A row is written once, as a decorated function or class; its keyword-only arguments are its
parameters. Checks, help, run names, reference pages and report labels are derived from it. The
package's own rows are read from their source without importing it, so that no config needs torch.
"""

import ast
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache, cached_property, reduce
from importlib import import_module
from math import inf, isfinite
from operator import or_
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin
from unicodedata import category

from fedlens import plugins
from fedlens.errors import FedlensError, shown, suggest
from fedlens.paths import expanded
from fedlens.plugins import Plugin, PluginError

F = TypeVar("F", bound=Callable[..., Any])

REQUIRED: Any = inspect.Parameter.empty  # the default of a parameter that has none
RESERVED = ("name", "plugin")  # keys of a row's settings that are not its parameters
MOST = 10**9  # the largest integer of a parameter whose range has no end
LARGEST = 1e38  # the largest other number of one: tensors are float32, which ends a little above
LONGEST = 4000  # characters of a text
LONGEST_PART = 255  # bytes between two slashes: no file system has longer names

# What a kind's functions are called with, by their traits and whether they are classes.
Takes = Callable[[Mapping[str, Any], bool], tuple[str, ...]]


@dataclass(frozen=True)
class FromTrait:
    """A default that every row may set by a trait of its own."""

    trait: str
    otherwise: Any


@dataclass(frozen=True)
class Range:
    """The numbers a parameter may take, as an interval: `Range("[0, 0.5)")`, `Range("(0, inf)")`.

    Examples:
        >>> import fedlens as fl
        >>> 0.5 in fl.Range("[0, 0.5)")
        False
    """

    interval: str

    def __contains__(self, value: float) -> bool:
        low, high, closed_low, closed_high = self._bounds
        above = value >= low if closed_low else value > low
        return above and (value <= high if closed_high else value < high)

    def __str__(self) -> str:
        low, high, closed_low, _ = self._bounds
        if high < inf:
            return f"in {self.interval}"
        return f"{low:g} or more" if closed_low else "positive" if low == 0 else f"above {low:g}"

    @property
    def endless(self) -> bool:
        """Whether every finite number above its lower end lies in it."""
        return self._bounds[1] == inf

    @cached_property
    def _bounds(self) -> tuple[float, float, bool, bool]:
        low, high = self.interval[1:-1].split(",")
        return float(low), float(high), self.interval[0] == "[", self.interval[-1] == "]"


@dataclass(frozen=True)
class Pattern:
    """The texts a parameter may take: a regular expression for the whole, and what it means.

    Examples:
        >>> "../up" in Pattern(r"\\w+", "letters and digits")
        False
    """

    expression: str
    words: str
    longest: int = LONGEST_PART  # bytes

    def __contains__(self, text: str) -> bool:
        fits = len(text.encode(errors="replace")) <= self.longest
        return fits and re.fullmatch(self.expression, text) is not None

    def __str__(self) -> str:
        return f"{self.words}, at most {self.longest} bytes"


@dataclass(frozen=True)
class Parameter:
    """A keyword argument of a row: `Annotated[float, Range("(0, inf)"), "what it does"] = 0.1`."""

    name: str
    type: Any  # as annotated, without what Annotated adds
    default: Any = REQUIRED
    range: Range | Pattern | None = None
    help: str = ""

    @property
    def type_name(self) -> str:
        if get_origin(self.type) is Literal:
            return " or ".join(str(option) for option in get_args(self.type))
        names = ["null" if one is NoneType else getattr(one, "__name__", str(one))
                 for one in _members(self.type)]  # fmt: skip
        return " or ".join(names)

    def checked(self, value: Any, where: str = "") -> Any:
        """`value` as this parameter's type; refuses another type or a number out of range.

        `where` is the config key that the parameter is below; "" means a function's argument.
        """
        key = f"{where}.{self.name}" if where else self.name
        if get_origin(self.type) is Literal:
            if value not in get_args(self.type):
                options = suggest(shown(value), map(str, get_args(self.type)))
                raise FedlensError(f"{key}={shown(value)} is unknown: {options}")
            return value
        members = _members(self.type)
        if value is None and NoneType in members:
            return None
        if isinstance(value, int) and not isinstance(value, bool):
            value = _as_float(value) if float in members and int not in members else value
        if Any not in members and not any(_is(value, one) for one in members):
            raise FedlensError(f"{key}={shown(value)} must be {self.type_name}.")
        if expected := self._expected(value):
            raise FedlensError(f"{key}={shown(value)} must be {expected}.")
        return value

    def _expected(self, value: Any) -> str:
        """What the value must be and is not; "" if it may be what it is."""
        if isinstance(value, str) and value != self.default:
            if isinstance(self.range, Pattern):
                return "" if value in self.range else str(self.range)
            return "" if _is_text(value) else TEXT
        if isinstance(value, bool) or not isinstance(value, int | float):
            return ""
        bounds = self.range if isinstance(self.range, Range) else None
        if bounds is not None and value not in bounds:
            infinite = isinstance(value, float) and not isfinite(value)
            return f"{bounds} and finite" if infinite and bounds.endless else f"{bounds}"
        most = MOST if isinstance(value, int) else LARGEST
        endless = isinstance(value, int) if bounds is None else bounds.endless
        if abs(value) > most and endless:
            return f"{f'{bounds}, and ' if bounds else ''}at most {most}"
        return ""


class RowSettings(dict[str, Any]):
    """A row's name and its parameters' values, as a config holds them; keys are attributes too.

    `plugin` has the file and the hash of a row that is not the package's own.

    Examples:
        >>> RowSettings(name="classes", classes_per_client=5).classes_per_client
        5
    """

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None

    def but(self, **values: Any) -> "RowSettings":
        """The same with these values."""
        return RowSettings({**self, **values})

    @property
    def parameters(self) -> dict[str, Any]:
        return {key: value for key, value in self.items() if key not in RESERVED}


@dataclass(frozen=True)
class Row:
    """One thing that can be chosen: `make` is the decorated function or class."""

    kind: str
    name: str
    label: str  # how reports call it; parameters may stand in it: "Nc={classes_per_client}"
    paper: str
    doc: str  # the first paragraph of its docstring
    parameters: tuple[Parameter, ...]
    traits: Mapping[str, Any]
    source: str  # module:name
    function: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    plugin: Plugin | None = field(default=None, compare=False, repr=False)  # the file it is from

    @property
    def make(self) -> Callable[..., Any]:
        """The function or class itself; a row of the package is imported when it is first used."""
        if self.function is not None:
            return self.function
        module, _, name = self.source.partition(":")
        found: Callable[..., Any] = getattr(import_module(module), name)
        return found

    @property
    def defaults(self) -> dict[str, Any]:
        return {one.name: one.default for one in self.parameters if one.default is not REQUIRED}

    def checked(self, values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
        """All parameters' values: those in `values`, checked, and defaults for the rest.

        `where` is the config key that chooses the row, for error messages; "" means that the
        values are arguments of a function.
        """
        choice, below = (f"{where}={self.name}", f"{where}.") if where else (f"'{self.name}'", "")
        known = {one.name: one for one in self.parameters}
        for key in values:
            if key not in known:
                raise FedlensError(f"{below}{key} is not read by {choice}: {_reads(self, key)}")
        given = {name: known[name].checked(value, where) for name, value in values.items()}
        for one in self.parameters:
            if one.name not in values and one.default is REQUIRED:
                raise FedlensError(f"{choice} needs {below}{one.name} ({one.help}).")
        return {
            name: given[name] if name in given else one.checked(one.default, where)
            for name, one in known.items()
        }

    def described(self, values: Mapping[str, Any]) -> str:
        """The label with these values in it; a parameter without any is shown by its name."""
        names = {one.name: one.name.upper() for one in self.parameters}
        return self.label.format_map(
            {key: f"{value:g}" if isinstance(value, float) else value
             for key, value in {**names, **self.defaults, **values}.items()}
        )  # fmt: skip

    def portable(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values with paths cut to their last name, which does not depend on the computer.

        The trait `paths` names parameters that are paths, and `path_or_name` one that is a path if
        it begins like one.
        """
        maybe = self.traits.get("path_or_name")
        return {
            key: Path(os.path.abspath(expanded(value))).name  # noqa: PTH100
            if isinstance(value, str)
            and (key in self.traits.get("paths", ()) or (key == maybe and is_path(value)))
            else value
            for key, value in values.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        if self.name in REGISTRIES[self.kind]:
            return find, (self.kind, self.name)
        return Row, tuple(getattr(self, one.name) for one in fields(self))  # of a plain function


class Registry:
    """All rows of one kind; calling it gives the decorator that adds one.

    Examples:
        >>> sorted(REGISTRIES)[:3]
        ['aggregator', 'backbone', 'client_optimizer']
    """

    def __init__(
        self,
        kind: str,
        modules: tuple[str, ...],
        *,
        what: str,
        common: tuple[Parameter, ...] = (),
        adopts: tuple[str, ...] = (),
        near: str | None = None,
        takes: Takes | None = None,
        doc: str = "",
    ) -> None:
        """`modules` hold the package's own rows (a package stands for all its modules).

        `common` parameters belong to every row; rows of the kinds in `adopts` count as rows of
        this one too. `near` is the function, as module:name, that knows what to choose for a name
        that is like no row's; it is imported only then. `takes` says what rows are called with;
        `doc` is what `help` shows.
        """
        self.kind = kind
        self.modules = modules
        self.what = what
        self.common = common
        self.adopts = adopts
        self.near = near
        self.takes = takes
        self.__doc__ = doc or type(self).__doc__
        self.added: dict[str, Row] = {}  # from outside the package
        REGISTRIES[kind] = self

    def __call__(
        self, *, label: str, paper: str = "", name: str | None = None, **traits: Any
    ) -> Callable[[F], F]:
        """A decorator that adds a function or class; its keyword-only arguments are parameters."""

        def add(function: F) -> F:
            if not function.__module__.startswith("fedlens."):
                self._add(_row_of(self, function, label, paper, name, traits))
            return function

        return add

    def _add(self, row: Row) -> None:
        taken = self._rows().get(row.name)
        if taken is not None and taken.source != row.source:
            raise FedlensError(
                f"The {self.what} '{row.name}' exists already ({taken.source}): choose another "
                "name."
            )
        self.check_signature(row.make, row.traits)
        self.added[row.name] = row

    def _rows(self) -> dict[str, Row]:
        found = {row.name: row for row in _written(self.kind)}
        for kind in self.adopts:
            found |= {
                name: replace(row, kind=self.kind, parameters=(*row.parameters, *self.common))
                for name, row in REGISTRIES[kind]._rows().items()
                if name not in found and row.traits.get("aggregates", True)
            }
        return found | self.added

    def __getitem__(self, name: str) -> Row:
        row = self.get(name)
        if row is None:
            raise FedlensError(f"There is no {self.what} '{name}': {suggest(name, self.names)}")
        return row

    def get(self, name: str) -> Row | None:
        """The row of that name, which may be a dotted path, or be in an installed plugin."""
        if name in (rows := self._rows()):
            return rows[name]
        if plugins.is_dotted(name):
            try:
                return self._add_dotted(name) if plugins.may_load(name) else None
            except FedlensError:
                if self._nearest(name) is not None:  # resnet18.a1_in1k is a name of timm's
                    return None
                raise
        return self._rows().get(name) if plugins.load_entry_points() else None

    def _add_dotted(self, path: str) -> Row:
        """A decorated function keeps its label and traits; the path is its name here."""
        function = plugins.attribute(path)
        source = f"{function.__module__}:{function.__qualname__}"
        kinds = [registry for registry in REGISTRIES.values()
                 if any(row.source == source for row in registry)]  # fmt: skip
        if kinds and self not in kinds:
            raise FedlensError(
                f"{path} is decorated as {kinds[0].kind} and cannot be used as {self.kind}."
            )
        for row in self:
            if row.source == source:
                self.added[path] = replace(row, name=path)
                break
        else:
            self.added[path] = self.row(function, name=path)
        return self.added[path]

    def row(self, choice: "str | Row | Callable[..., Any]", *, name: str | None = None) -> Row:
        """The row of a name, the row itself, or one of a plain function, which is not added."""
        if isinstance(choice, str):
            return self[choice]
        if isinstance(choice, Row):
            return choice
        for row in self:
            if row.function is choice:
                return row
        self.check_signature(choice, {})
        return _row_of(self, choice, choice.__name__, "", name or choice.__name__, {})

    def check_signature(
        self,
        function: Callable[..., Any],
        traits: Mapping[str, Any],
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """Refuses a function that cannot be called as rows of this kind are.

        With `parameters` it is a function for one call, which may name them as it likes;
        without, it is a row, whose parameters are keyword-only.
        """
        if self.takes is None:
            return
        expected = self.takes(traits, inspect.isclass(function))
        name, arguments = getattr(function, "__name__", str(function)), ", ".join(expected)
        try:
            signature = inspect.signature(function)
        except ValueError as error:
            raise FedlensError(
                f"{name} has parameters that Python cannot list: wrap it in a function of "
                f"({arguments})."
            ) from error
        required = {
            one.name: None
            for one in signature.parameters.values()
            if one.kind is one.KEYWORD_ONLY and one.default is REQUIRED
        }
        try:
            signature.bind(*expected, **(required if parameters is None else parameters))
        except TypeError as error:
            more = "" if parameters is None else f" ({error})"
            raise FedlensError(f"{name} must take ({arguments}){more}.") from error
        positional = [one.name for one in signature.parameters.values()
                      if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]  # fmt: skip
        if parameters is None and (extra := positional[len(expected) :]):
            head = ", ".join([*expected, "*", *extra])
            raise FedlensError(
                f"{name} must take ({arguments}): write its parameters behind a *, as in ({head})."
            )

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows().values())

    def __contains__(self, name: object) -> bool:
        return name in self._rows()

    @property
    def names(self) -> list[str]:
        return list(self._rows())

    def settings(self, given: str | Mapping[str, Any], where: str) -> RowSettings:
        """A config's choice, complete: the row's name and a checked value of every parameter."""
        if not isinstance(given, str | Mapping):
            raise FedlensError(f"{where}={shown(given)} has no `name`: write {where}=NAME.")
        values = self.chosen(given) if isinstance(given, str) else dict(given)
        name, made_with = values.pop("name", None), values.pop("plugin", None)
        if not isinstance(name, str):
            raise FedlensError(f"{where} has no `name`: write {where}=NAME.")
        row = self.get(name)
        if row is None and made_with is not None:
            file = str(made_with).rpartition(":")[0]
            raise PluginError(
                f"{where}={name} comes from the plugin {plugins.shown(str(made_with))}, which is "
                f"not loaded here: add --plugin {file}."
            )
        if row is None:
            raise FedlensError(f"{where}={shown(name)} is unknown: {self._suggestion(name)}")
        source = {} if row.plugin is None else {"plugin": row.plugin.word}
        if made_with not in (None, source.get("plugin")):
            loaded = plugins.shown(source["plugin"]) if source else row.source
            raise PluginError(
                f"{where}={name} comes from the plugin {plugins.shown(str(made_with))}, but "
                f"{loaded} is loaded here: load the same file again (a run keeps a copy in its "
                f"folder, in {plugins.FOLDER}/), or start another run."
            )
        return RowSettings(name=name, **row.checked(values, where), **source)

    def chosen(self, choice: str) -> dict[str, Any]:
        """What a word on the command line chooses: a row's name, or `name:argument`.

        The argument is the parameter that the row's trait `argument` names, so `last_blocks:2`
        stands for the row `last_blocks` with `count=2`.
        """
        name, colon, value = choice.partition(":")
        row = self.get(name) if colon else None
        argument = row.traits.get("argument") if row is not None else None
        if row is None or argument is None:
            return {"name": choice}
        parameter = next(one for one in row.parameters if one.name == argument)
        number = int in _members(parameter.type) and value.isdigit()
        return {"name": name, argument: int(value) if number else value}

    def spelled(self, settings: Mapping[str, Any]) -> str:
        """The word that `chosen` reads: the row's name, with its argument if it has one."""
        name = str(settings["name"])
        argument = self[name].traits.get("argument")
        return name if argument is None else f"{name}:{settings[argument]}"

    def _suggestion(self, name: str) -> str:
        near = self._nearest(name)
        if near is not None:
            return f"did you mean '{near}'?"
        return suggest(name, [self._spelled_option(row) for row in self])

    def _nearest(self, name: str) -> str | None:
        """What `near` knows; None if there is none, or if a row's name is nearer."""
        if self.near is None or get_close_matches(name, self.names, n=1, cutoff=0.8):
            return None
        module, _, function = self.near.partition(":")
        found: str | None = getattr(import_module(module), function)(name)
        return found

    def _spelled_option(self, row: Row) -> str:
        argument = row.traits.get("argument")
        return row.name if argument is None else f"{row.name}:{argument.upper()}"


REGISTRIES: dict[str, Registry] = {}


def load_plugin(path: Path) -> None:
    """Loads a plugin's file; of one that has changed, the rows are those it has now."""
    before = {kind: dict(registry.added) for kind, registry in REGISTRIES.items()}
    here = expanded(path).absolute()
    for registry in REGISTRIES.values():
        registry.added = {name: row for name, row in registry.added.items()
                          if row.plugin is None or row.plugin.path != here
                          or not _has_changed(row.plugin)}  # fmt: skip
    try:
        plugins.load(path, _check_rows)
    except FedlensError:
        for kind, registry in REGISTRIES.items():
            registry.added = before[kind]
        raise


def _has_changed(plugin: Plugin) -> bool:
    return not plugin.path.exists() or plugin.path.read_bytes() != plugin.source


def _check_rows(plugin: Plugin) -> None:
    rows = [row for registry in REGISTRIES.values() for row in registry.added.values()]
    if not any(row.plugin is not None and row.plugin.word == plugin.word for row in rows):
        raise FedlensError(
            f"The plugin {plugin.path} registers nothing: decorate a function with @fl.aggregator, "
            "@fl.mask_rule or another of `fedlens config rows`."
        )


def find(kind: str, name: str) -> Row:
    return REGISTRIES[kind][name]


# --- a row from a function at hand ---------------------------------------------------------------


def _row_of(
    registry: Registry,
    function: Callable[..., Any],
    label: str,
    paper: str,
    name: str | None,
    traits: Mapping[str, Any],
) -> Row:
    own = [
        parameter_of(one.name, _annotation(function, one.annotation), one.default)
        for one in inspect.signature(function).parameters.values()
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    if reserved := [one.name for one in own if one.name in RESERVED]:
        raise FedlensError(f"{function.__name__}: a parameter cannot be called '{reserved[0]}'.")
    return Row(
        kind=registry.kind,
        name=name or snake_case(function.__name__),
        label=label,
        paper=paper,
        doc=_first_paragraph(function.__doc__),
        parameters=(*own, *_common(registry, traits)),
        traits=dict(traits),
        source=f"{function.__module__}:{function.__qualname__}",
        function=function,
        plugin=plugins.of(function),
    )


def _annotation(function: Callable[..., Any], annotation: Any) -> Any:
    """Only of parameters: other arguments may be annotated with types that are not imported."""
    if not isinstance(annotation, str):
        return annotation
    of_class = isinstance(function, type)
    made_by = getattr(function, "__init__") if of_class else inspect.unwrap(function)  # noqa: B009
    return eval(annotation, getattr(made_by, "__globals__", {}))  # of the row's own module


def _common(registry: Registry, traits: Mapping[str, Any]) -> Iterator[Parameter]:
    for one in registry.common:
        if isinstance(one.default, FromTrait):
            default = traits.get(one.default.trait, one.default.otherwise)
            yield replace(one, default=default)
        else:
            yield one


def parameter_of(name: str, annotation: Any, default: Any) -> Parameter:
    """The parameter of an annotated argument, or of a dataclass's field.

    A range may be that of the whole, `Annotated[int | None, Range("[1, 9]")]`, or of one of several
    types, `Annotated[int, Range("[1, 9]")] | None`.
    """
    if annotation is inspect.Parameter.empty:
        annotation = Any if default in (REQUIRED, None) else type(default)
    parts = [get_args(one) if get_origin(one) is Annotated else (one,)
             for one in _members(annotation)]  # fmt: skip
    kind = reduce(or_, [part[0] for part in parts])
    extras = [extra for part in parts for extra in part[1:]]
    bounds = next((one for one in extras if isinstance(one, Range | Pattern)), None)
    text = next((one for one in extras if isinstance(one, str)), "")
    return Parameter(name, kind, default, bounds, text)


# --- the package's own rows, read from their source ----------------------------------------------


@cache
def _written(kind: str) -> tuple[Row, ...]:
    registry = REGISTRIES[kind]
    found = []
    for package in registry.modules:
        for module, path in _sources(package):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    found += [
                        _row_in(registry, module, node, given)
                        for given in map(_keywords_of(kind), node.decorator_list)
                        if given is not None
                    ]
    return tuple(sorted(found, key=lambda row: row.traits.get("order", 100)))


def _sources(name: str) -> list[tuple[str, Path]]:
    """The files of a module, or of all modules of a package, without importing any of them."""
    *path, last = name.split(".")
    folder = Path(__file__).parent.joinpath(*path[1:])
    if (file := folder / f"{last}.py").exists():
        return [(name, file)]
    return [(f"{name}.{one.stem}", one) for one in sorted((folder / last).glob("[!_]*.py"))]


def _keywords_of(kind: str) -> Callable[[ast.expr], dict[str, Any] | None]:
    def keywords(decorator: ast.expr) -> dict[str, Any] | None:
        if not (isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name)):
            return None
        if decorator.func.id != kind:
            return None
        return {str(one.arg): ast.literal_eval(one.value) for one in decorator.keywords}

    return keywords


def _row_in(
    registry: Registry, module: str, node: ast.FunctionDef | ast.ClassDef, given: dict[str, Any]
) -> Row:
    return Row(
        kind=registry.kind,
        name=given.pop("name", None) or snake_case(node.name),
        label=given.pop("label"),
        paper=given.pop("paper", ""),
        doc=_first_paragraph(ast.get_docstring(node)),
        parameters=(*_parameters_in(node), *_common(registry, given)),
        traits=given,
        source=f"{module}:{node.name}",
    )


def _parameters_in(node: ast.FunctionDef | ast.ClassDef) -> Iterator[Parameter]:
    """Keyword-only arguments of a function or of a class's __init__, or a dataclass's fields."""
    if isinstance(node, ast.ClassDef):
        made = [one for one in node.body if isinstance(one, ast.FunctionDef)]
        init = next((one for one in made if one.name == "__init__"), None)
        if init is None:
            for one in node.body:
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                    kind = _evaluated(one.annotation)
                    yield parameter_of(one.target.id, kind, _default(one.value))
            return
        node = init
    for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        assert argument.annotation is not None
        yield parameter_of(argument.arg, _evaluated(argument.annotation), _default(default))


def _evaluated(annotation: ast.expr) -> Any:
    names = {"Annotated": Annotated, "Any": Any, "Literal": Literal, "Range": Range}
    return eval(ast.unparse(annotation), names)  # of our own source


def _default(value: ast.expr | None) -> Any:
    return REQUIRED if value is None else ast.literal_eval(value)


def is_path(word: str) -> bool:
    """Whether a word that may be a name or a path is a path: it begins with /, . or ~."""
    return word.startswith(("/", ".", "~")) or PurePath(word).is_absolute()


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _first_paragraph(doc: str | None) -> str:
    return " ".join(inspect.cleandoc(doc or "").partition("\n\n")[0].split())


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is(value: Any, kind: Any) -> bool:
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is(one, get_args(kind)[0]) for one in value)
    kind = get_origin(kind) or kind
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, kind)


TEXT = (
    f"text that is not empty, without control characters, of at most {LONGEST_PART} bytes between "
    "two slashes"
)


def _is_text(value: str) -> bool:
    """Whether a file system takes it as a name or a path: most texts of configs are."""
    return (
        0 < len(value.strip()) <= len(value) <= LONGEST
        and not any(category(char) in ("Cc", "Cs") for char in value)
        and all(len(part.encode()) <= LONGEST_PART for part in value.split("/"))
    )


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return inf if value > 0 else -inf


def _reads(row: Row, key: str) -> str:
    """What to do about a key that the row does not know."""
    others = [one.name for one in REGISTRIES[row.kind] if key in {p.name for p in one.parameters}]
    if others:
        return f"leave it out, or choose {' or '.join(others)}."
    known = [one.name for one in row.parameters]
    return suggest(key, known) if known else "it has no parameters."


# --- the kinds -----------------------------------------------------------------------------------
# A kind's `doc` says what its rows are called with; the reference page prints it.

merge_method = Registry(
    "merge_method",
    ("fedlens.arithmetic.merging", "fedlens.arithmetic.matrix_merging"),
    what="merging method",
    takes=lambda traits, _: (
        "vectors",
        "weights",
        *(["draws"] if traits.get("random") else []),
        *(["statistics"] if traits.get("needs") else []),
    ),
    common=(
        Parameter("scale", float, 1.0, Range("(0, inf)"), "λ, the factor of the merged vector"),
    ),
    doc="""How many task vectors become one: for `merge`, and as an aggregator of client updates.

    A function `(vectors, weights, **parameters)` that returns the merged vector. `vectors` are maps
    from names to tensors, and `weights` are numbers with mean 1. With the trait `random=True` it
    takes a third argument: for each vector, a function from a tensor's name to a
    `torch.Generator`. With the trait `needs="fisher"` or `needs="input_moments"` its last argument
    is a list of maps, one for each vector: the diagonal Fisher information of each model, or the
    second moments of its layers' inputs. The trait `matrices=True` says that it reads tensors as
    matrices, so masked ones are given whole. Every row also has the parameter `scale`, which
    `merge` applies. A row with the trait `aggregates=False` is not offered as an aggregator.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> @fl.merge_method(label="largest")
        ... def largest_magnitude(vectors, weights):
        ...     stacked = {name: torch.stack([one[name] for one in vectors]) for name in vectors[0]}
        ...     return {name: values.gather(0, values.abs().argmax(0, keepdim=True))[0]
        ...             for name, values in stacked.items()}
        >>> vectors = [{"w": torch.tensor([1.0, -4.0])}, {"w": torch.tensor([3.0, 2.0])}]
        >>> fl.merge(vectors, method="largest_magnitude", scale=0.5)["w"].tolist()
        [1.5, -2.0]
    """,
)  # fmt: skip
aggregator = Registry(
    "aggregator",
    ("fedlens.federated.algorithms",),
    what="aggregator",
    takes=lambda _, made: ("start", "stream") if made else ("updates", "weights"),
    adopts=("merge_method",),
    doc="""How the updates of a round's clients become one change of the global model.

    A function `(updates, weights, **parameters)` that returns the change. `updates` are the
    clients' changes w_k − w, maps from names to float64 tensors, and `weights` their numbers of
    examples. A class is called as `Row(start, stream, **parameters)` in every round, and has `add`
    for one client's `Contribution` and `change` for the result, so that it need not hold all
    updates. With the trait `needs="fisher"` or `needs="input_moments"` clients send that too, and
    a `Contribution` has it as `statistics`. Every merging method is an aggregator too.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> @fl.aggregator(label="damped mean, {factor}", paper="https://example.org")
        ... def damped_mean(updates, weights, *, factor: float = 0.5):
        ...     shares = [factor * weight / sum(weights) for weight in weights]
        ...     return {name: sum(share * update[name] for share, update in zip(shares, updates))
        ...             for name in updates[0]}
        >>> data = torch.randn(20, 3), torch.arange(20) % 2
        >>> fed = fl.fedavg(torch.nn.Linear(3, 2), data, fl.partition(data[1], clients=4), lr=0.1,
        ...                 local_steps=2, batch_size=5, aggregator="damped_mean")
        >>> state, report = fed.apply(fed.init(), fed.sample(fed.init(), participation=0.5))
        >>> fl.aggregator["damped_mean"].described({"factor": 0.9})
        'damped mean, 0.9'
    """,
)
server_optimizer = Registry(
    "server_optimizer",
    ("fedlens.federated.algorithms",),
    what="server optimizer",
    takes=lambda *_: (),
    common=(
        Parameter("lr", float, 1.0, Range("(0, inf)"), "the server's learning rate; 1 averages"),
    ),
    doc="""How the server applies the aggregated change: w ← w + lr · direction.

    A class called with the row's parameters. `init(parameters)` returns the moments before the
    first round, a map from kinds of moments to tensors by name; `direction(change, moments)`
    returns the direction and the new moments of one tensor, and changes neither argument. Every row
    also has the parameter `lr`.

    Examples:
        >>> import fedlens as fl
        >>> @fl.server_optimizer(label="sign of the change")
        ... class ServerSign:
        ...     def init(self, parameters):
        ...         return {}
        ...
        ...     def direction(self, change, moments):
        ...         return change.sign(), moments
        >>> fl.server_optimizer["server_sign"].defaults
        {'lr': 1.0}
    """,
)
correction = Registry(
    "correction",
    ("fedlens.federated.server.correction", "fedlens.federated.algorithms"),
    what="correction of clients' gradients",
    takes=lambda *_: (),
    doc="""A term that clients add to each gradient, from what the server remembers.

    A class called with the row's parameters, with the methods and attributes of
    `fedlens.federated.server.correction.Correction`: `init` gives what the server remembers, `term`
    what is added to a client's gradients, and `begin` an object that takes in the round's updates.
    The traits `needs_effective_steps=True`, `client_states=True` and `moves_model=True` (it changes
    the aggregated change) say what it cannot be combined with.

    Examples:
        >>> import fedlens as fl
        >>> from fedlens.federated.algorithms.ghbm import GHBM
        >>> @fl.correction(label="heavy ball", needs_effective_steps=True)
        ... class HeavyBall(GHBM):
        ...     def __init__(self, *, beta: float = 0.5):
        ...         super().__init__(beta=beta, tau=1)
        >>> fl.correction["heavy_ball"].make(beta=0.2).tau
        1
    """,
)
model_average = Registry(
    "model_average",
    ("fedlens.federated.server.model_average",),
    what="average of global models",
    takes=lambda *_: (),
    doc="""An average of the global models of several rounds, which is evaluated in their place.

    A class called with the row's parameters. `updated(memory, model)` returns what is remembered
    once a round has given `model`, a map from kinds to tensors by name; `memory` is empty before
    the first round. `value(memory)` returns the average. Neither changes its arguments.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> @fl.model_average(label="mean of all models")
        ... class AllModels:
        ...     def updated(self, memory, model):
        ...         count = memory["count"]["rounds"] + 1 if memory else torch.tensor(1)
        ...         before = memory["sum"] if memory else {name: 0 for name in model}
        ...         total = {name: before[name] + value for name, value in model.items()}
        ...         return {"sum": total, "count": {"rounds": count}}
        ...     def value(self, memory):
        ...         count = memory["count"]["rounds"]
        ...         return {name: value / count for name, value in memory["sum"].items()}
        >>> average, memory = fl.model_average["all_models"].make(), {}
        >>> for weight in (1.0, 3.0):
        ...     memory = average.updated(memory, {"w": torch.tensor([weight])})
        >>> average.value(memory)["w"].tolist()
        [2.0]
    """,
)
sampling = Registry(
    "sampling",
    ("fedlens.federated.sampling",),
    what="way to sample clients",
    takes=lambda *_: ("seed", "round", "clients", "size"),
    doc="""Which clients take part in a round.

    A function `(seed, round, clients, size, **parameters)` that returns the numbers of `size`
    clients, from 0 to `clients` − 1. The same arguments must give the same clients. With the trait
    `sequential=True` it returns lists of numbers: chains of clients that train one after another.

    Examples:
        >>> import fedlens as fl
        >>> @fl.sampling(label="the next clients")
        ... def next_clients(seed, round_, clients, size):
        ...     return sorted((round_ * size + place) % clients for place in range(size))
        >>> fl.sampling["next_clients"].make(0, 1, 10, 3)
        [3, 4, 5]
    """,
)
diagnostic = Registry(
    "diagnostic",
    ("fedlens.federated.diagnostics",),
    what="round diagnostic",
    takes=lambda *_: ("start",),
    doc="""What every round measures of its clients' updates.

    A class called as `Row(start)` in every round, with the parameters that clients start from.
    `add(delta, norm, weight)` takes one client's change w_k − w, its length and the client's number
    of examples, and must not change `delta`; `result(mean)` gets the weighted mean of all changes
    and returns a number, a list of numbers or None.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> @fl.diagnostic(label="longest update")
        ... class LongestUpdate:
        ...     def __init__(self, start):
        ...         self.longest = 0.0
        ...
        ...     def add(self, delta, norm, weight):
        ...         self.longest = max(self.longest, norm)
        ...
        ...     def result(self, mean):
        ...         return self.longest
        >>> data = torch.randn(20, 3), torch.arange(20) % 2
        >>> fed = fl.fedavg(torch.nn.Linear(3, 2), data, fl.partition(data[1], clients=4), lr=0.1,
        ...                 local_steps=2, batch_size=5, diagnostics=["longest_update"])
        >>> _, report = fed.apply(fed.init(), fed.sample(fed.init()))
        >>> list(report.diagnostics)
        ['longest_update']
    """,
)
engine = Registry(
    "engine",
    ("fedlens.federated.engines", "fedlens.experiments.flower"),
    what="engine",
    takes=lambda traits, _: (
        ("config", "stop", "grid") if traits.get("remote") else ("trainer", "clients")
    ),
    doc="""Who carries out the clients' training: this process, worker processes, or remote nodes.

    A function `(trainer, clients, **parameters)` that returns an engine, where `trainer` trains one
    client and `clients` is their number in a round. `updates(parameters, tasks)` of the engine
    yields one update for each task, in their order, and `close()` ends it.

    Examples:
        >>> import fedlens as fl
        >>> class OneByOne:
        ...     def __init__(self, trainer):
        ...         self.trainer = trainer
        ...
        ...     def updates(self, parameters, tasks):
        ...         for task in tasks:
        ...             yield self.trainer.train(task, parameters)
        ...
        ...     def close(self):
        ...         pass
        >>> @fl.engine(label="one by one")
        ... def one_by_one(trainer, clients):
        ...     return OneByOne(trainer)
        >>> "one_by_one" in fl.engine
        True
    """,
)
client_optimizer = Registry(
    "client_optimizer",
    ("fedlens.training.optimizers",),
    what="client optimizer",
    takes=lambda *_: (),
    doc="""The optimizer of central training, and of every client.

    A class called with the row's parameters. `make(named, masks, *, lr)` returns a
    `torch.optim.Optimizer` of the named parameters, which trains only the entries of `masks` where
    a parameter has one. FedNova, SCAFFOLD, GHBM and FedCM also need `effective_steps(steps)`, and
    the trait `effective_steps=True`.

    Examples:
        >>> import fedlens as fl
        >>> from dataclasses import dataclass
        >>> @fl.client_optimizer(label="SGD with Nesterov momentum")
        ... @dataclass(frozen=True, kw_only=True)
        ... class NesterovSgd:
        ...     momentum: float = 0.9
        ...
        ...     def make(self, named, masks, *, lr):
        ...         return fl.SparseSGDM(named, lr, self.momentum, nesterov=True, masks=masks or {})
        >>> fl.client_optimizer["nesterov_sgd"].defaults
        {'momentum': 0.9}
    """,
)
mask_rule = Registry(
    "mask_rule",
    ("fedlens.sparse.masks",),
    what="mask rule",
    takes=lambda *_: ("weight", "sensitivity"),
    doc="""Which weights are trained: the rule ranks them, and the density says how many.

    A function `(weight, sensitivity, **parameters)` that returns one value for every entry of the
    tensor `weight`; entries with the smallest values are trained, or with the largest if the trait
    `largest=True`. With the trait `sensitivity=False` it needs no scores, and `sensitivity` is
    None. None as the result ranks at random.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> @fl.mask_rule(label="lowest saliency")
        ... def lowest_saliency(weight, sensitivity):
        ...     return sensitivity * weight.square()
        >>> model = torch.nn.Linear(2, 1)
        >>> scores = {"weight": torch.tensor([[0.0, 1.0]])}
        >>> fl.mask(model, scores, rule="lowest_saliency", density=0.5)
        {'weight': tensor([[ True, False]])}
    """,
)
partitioner = Registry(
    "partitioner",
    ("fedlens.data.partitions.partition", "fedlens.data.partitions.assignments"),
    what="partition",
    takes=lambda *_: ("labels", "clients", "seed"),
    doc="""Who holds which training example.

    A function `(labels, clients, seed, **parameters)` that returns the client of each sample, as an
    integer tensor. `labels` are numbered from 0 without gaps; every client must get a sample. With
    the trait `assigned=True`, a function `(samples, **parameters)` that returns an id of the client
    of each of the dataset's training samples, before any are held out: `samples` has their `count`,
    `names` and `clients` (or None), and the number of clients follows. Parameters in the trait
    `paths` are paths: only the base name is part of what a run is.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> @fl.partitioner(label="in order")
        ... def in_order(labels, clients, seed):
        ...     return torch.arange(len(labels)) * clients // len(labels)
        >>> fl.partition([0, 1, 0, 1, 0, 1], clients=3, by="in_order").shard(0)
        tensor([0, 1])
    """,
)
dataset = Registry(
    "dataset",
    ("fedlens.data.sources",),
    what="dataset",
    takes=lambda *_: ("root",),
    common=(
        Parameter(
            "root", str | None, None, None,
            "folder that holds the files; null: $FEDLENS_DATA, else the user's cache",
        ),
        Parameter("validation", float, 0.1, Range("[0, 1)"),
                  "fraction of the training images held out, stratified"),
        Parameter("train_per_class", int | None, None, Range("[1, inf)"),
                  "use only so many training images of each class"),
        Parameter("test_per_class", int | None, None, Range("[1, inf)"),
                  "use only so many test images of each class"),
    ),
    doc="""Images with labels, in a training and a test split.

    A function `(root, **parameters)` that returns a `fedlens.data.images.Dataset`; nothing is read
    before a split is loaded. The traits `classes`, `train_images`, `test_images` and `image_size`
    are what plans and estimates of costs read. With the trait `resolution=True` it is called as
    `(root, resolution, **parameters)` with the pixels of the backbone's inputs. The parameters
    below are of all datasets.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> from fedlens.data.images import Dataset, Images
        >>> @fl.dataset(label="noise", classes=2, train_images=8, test_images=4, image_size=32)
        ... def noise(root):
        ...     def load(count):
        ...         pixels = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8)
        ...         return Images(pixels, torch.arange(count) % 2)
        ...
        ...     return Dataset(name="noise", digest="noise-1", load_classes=lambda: ("a", "b"),
        ...                    load_train=lambda: load(8), load_test=lambda: load(4))
        >>> len(fl.dataset["noise"].make(None).load_train())
        8
    """,
)  # fmt: skip
backbone = Registry(
    "backbone",
    ("fedlens.models.architectures.backbones",),
    what="backbone",
    near="fedlens.models.architectures.timm_models:near",
    common=(
        Parameter("resolution", int | None, FromTrait("resolution", None), Range("[1, 4096]"),
                  "pixels; null: the backbone's own, else the images' own"),
        Parameter("pretrained", bool | None, FromTrait("pretrained", None), None,
                  "start from pretrained weights; null: if backbone.weights names a file"),
        Parameter("weights", str | None, None, None,
                  "a local file; null: $FEDLENS_WEIGHTS, else the cache or a download"),
        Parameter("sha256", str | None, None, None, "refuse a file with another hash"),
        Parameter("features", str | None, FromTrait("features", None), None,
                  "output: what the module returns; else the submodule whose output is the "
                  "features; null: found"),
        Parameter("freeze_blocks", int, 0, Range("[0, 10000]"),
                  "freeze the embeddings or stem and so many of the first blocks"),
        Parameter("batch_norm", Literal["auto", "frozen", "averaged", "local"], "auto", None,
                  "statistics of BatchNorm layers: frozen; trained and averaged; or kept by each "
                  "client (FedBN); auto: frozen if pretrained, else averaged"),
    ),
    doc="""What maps images to features: any `nn.Module`.

    A function `(**parameters)` that returns an `nn.Module`; with an argument `resolution` it is
    given the size of the images in pixels. The module gets normalised images [B, 3, R, R]. Its
    classifier, if it has one, is removed, and its features are found or named by the parameter
    `features`. Traits: `resolution`, the usual size; `mean` and `std`, of the three channels of
    pixels in [0, 1], else 0.5; `patch`, of which the resolution is a multiple. The parameters below
    are of all backbones.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> from fedlens.models.architectures import backbones
        >>> @fl.backbone(label="small CNN", resolution=32)
        ... def small_cnn(*, width: int = 8):
        ...     return torch.nn.Sequential(
        ...         torch.nn.Conv2d(3, width, 3, stride=2), torch.nn.ReLU(),
        ...         torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        ...     )
        >>> backbones.create(backbones.find("small_cnn"))(torch.zeros(5, 3, 32, 32)).shape
        torch.Size([5, 8])
    """,
)  # fmt: skip
head = Registry(
    "head",
    ("fedlens.models.heads",),
    what="head",
    takes=lambda traits, _: (
        ("statistics", "validation")
        if traits.get("fitted", True) and traits.get("by", "statistics") == "statistics"
        else ("width", "classes", "seed")
    ),
    common=(
        Parameter("freeze", bool, FromTrait("fitted", True), None,
                  "do not train the head with the backbone; true for heads that were fitted first"),
        Parameter("dropout", float, 0.0, Range("[0, 1)"), "on the features before the head"),
        Parameter("layers", int, FromTrait("layers", 0), Range("[0, 10000]"),
                  "how many of the last blocks the head reads besides the backbone's output"),
        Parameter("tokens", Literal["class", "mean", "both"], FromTrait("tokens", "class"), None,
                  "which tokens of a layer it reads; without a class token, the mean of all"),
        Parameter("random_features", int | None, None, Range("[1, 1000000]"),
                  "read so many random features of those tokens instead; null: the tokens"),
        Parameter("train_layers", int | None, None, Range("[0, 10000]"),
                  "train the backbone under a closed-form head on so many of the blocks, and solve "
                  "the head on all of them after the last round; null: on all from the start"),
    ),
    doc="""The linear layer on the backbone's features, and how it is found.

    With the trait `fitted=False`, a function `(width, classes, seed, **parameters)` that returns an
    `nn.Linear` to start from. With `fitted=True` and `by="statistics"`, a function
    `(statistics, validation, **parameters)` of the sum of all clients' statistics and of validation
    `(features, labels)`; it returns an `nn.Linear` and a dict of the numbers that it chose.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> @fl.head(label="zero head", fitted=False)
        ... def zero(width, classes, seed):
        ...     layer = torch.nn.Linear(width, classes)
        ...     for parameter in layer.parameters():
        ...         torch.nn.init.zeros_(parameter)
        ...     return layer
        >>> fl.head["zero"].make(4, 2, seed=0).weight.count_nonzero().item()
        0
    """,
)  # fmt: skip
trainable = Registry(
    "trainable",
    ("fedlens.models.trained_parts.trainable",),
    what="part to train",
    takes=lambda *_: ("backbone", "stream"),
    doc="""Which part of the backbone is trained; the head is a choice of its own.

    A function `(backbone, stream, **parameters)` that leaves `requires_grad` on for what is
    trained, in place; random numbers come from `stream.draw(…)`, a `torch.Generator`. With the
    trait `masks=False` it cannot be combined with `sparse.density`.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> @fl.trainable(label="first layer")
        ... def first_layer(backbone, stream):
        ...     for name, parameter in backbone.named_parameters():
        ...         parameter.requires_grad_(name.startswith("0."))
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> fl.trainable["first_layer"].make(net, None)
        >>> [parameter.requires_grad for parameter in net.parameters()]
        [True, True, False, False]
    """,
)
question = Registry(
    "question",
    ("fedlens.reporting.study.questions",),
    what="report question",
    takes=lambda *_: ("methods",),
    doc="""A question that a report answers with tables.

    A function `(methods, **parameters)` of all methods of one setting that returns the comparisons
    to print, or none where there is nothing to compare.

    Examples:
        >>> import fedlens as fl
        >>> @fl.question(label="Runs with a head alone")
        ... def heads_alone(methods):
        ...     return []
        >>> fl.question["heads_alone"].label
        'Runs with a head alone'
    """,
)
