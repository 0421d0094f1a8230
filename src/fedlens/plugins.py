"""Code from outside the package: a file given by `--plugin`, a module named by a dotted path, or a
package with an entry point in the group `fedlens.plugins`. No torch.

A plugin is known by the SHA-256 of its source. Loading it adds its rows to the registry; processes
that this one starts load the same source before they unpickle anything.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from fedlens.errors import FedlensError, suggest
from fedlens.paths import expanded

GROUP = "fedlens.plugins"
FOLDER = "plugins"  # in a run's folder: copies of the plugins that it uses
SCRIPTS = ("__main__", "__mp_main__")


class PluginError(FedlensError):
    """A config names a row whose plugin is not loaded, or is another one than it was made with."""


@dataclass(frozen=True)
class Plugin:
    """A Python file that rows come from."""

    module: str  # its name among the loaded modules
    path: Path
    source: bytes = field(repr=False)

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.source).hexdigest()

    @property
    def file(self) -> str:
        """`mine.py`, or `lab/methods.py` for the module lab.methods."""
        return f"{self.module.replace('.', '/')}.py"

    @property
    def word(self) -> str:
        """How configs and manifests call it: the file's name and hash, wherever it lies."""
        return f"{self.file}:{self.sha256}"


def shown(word: str) -> str:
    """A plugin's word, short enough for a sentence: `mine.py (3f2a1b4c)`."""
    file, _, digest = word.rpartition(":")
    return f"{file} ({digest[:8]})"


_files: dict[str, Plugin] = {}  # module → plugin loaded from a file
_imported: dict[str, Path] = {}  # module of a dotted path → the folder that was searched first
_entry_points_loaded = False
_closed = False


# --- files ---------------------------------------------------------------------------------------


def load(path: Path, check: Callable[[Plugin], None]) -> Plugin:
    """Runs a plugin's file as a module named like it; a changed file replaces what it was.

    Its own folder comes first on the path meanwhile, so it can import files beside it. What `check`
    refuses is not loaded.
    """
    path = expanded(path).absolute()
    if path.suffix != ".py" or not path.stem or "." in path.stem:
        raise FedlensError(f"The plugin {path} is not a Python file, such as mine.py.")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise FedlensError(f"The plugin {path} cannot be read: {error.strerror}.") from error
    return _run(Plugin(path.stem, path, source), check)


def _run(plugin: Plugin, check: Callable[[Plugin], None] = lambda _: None) -> Plugin:
    known = _files.get(plugin.module)
    if known is not None and known.sha256 == plugin.sha256:
        return known
    if known is None or known.path != plugin.path:
        _refuse_taken_name(plugin)
    module = ModuleType(plugin.module)
    module.__file__ = str(plugin.path)
    module.__spec__ = importlib.util.spec_from_file_location(plugin.module, plugin.path)
    before = sys.modules.get(plugin.module)
    sys.modules[plugin.module], _files[plugin.module] = module, plugin
    try:
        with _first_on_path(plugin.path.parent):
            code = compile(plugin.source, str(plugin.path), "exec", dont_inherit=True)
            exec(code, module.__dict__)
        check(plugin)
    except (Exception, SystemExit) as error:
        _restore(sys.modules, plugin.module, before)
        _restore(_files, plugin.module, known)
        raise _as_sentence(error, str(plugin.path)) from error
    return plugin


def _restore(table: dict[str, Any], key: str, before: Any) -> None:
    if before is None:
        del table[key]
    else:
        table[key] = before


def _refuse_taken_name(plugin: Plugin) -> None:
    """Objects are pickled by their module's name, so two modules cannot share one."""
    taken = getattr(sys.modules.get(plugin.module), "__file__", None)
    if taken is None and (spec := importlib.util.find_spec(plugin.module)) is not None:
        taken = spec.origin if _is_installed(spec.origin) else None
    if plugin.module in sys.modules or plugin.module in sys.stdlib_module_names or taken:
        raise FedlensError(
            f"The plugin {plugin.path} has the name of another module ({taken or plugin.module}): "
            "rename the file."
        )


def _is_installed(origin: str | None) -> bool:
    paths = sysconfig.get_paths()
    return origin is not None and origin.startswith((paths["purelib"], paths["platlib"]))


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    importlib.invalidate_caches()  # the file may be younger than the last look into its folder
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _as_sentence(error: BaseException, file: str) -> FedlensError:
    """What is wrong with a plugin, with its file and line."""
    loaders = (str(Path(__file__).parent), str(Path(importlib.__file__).parent), "<frozen")
    line = getattr(error, "lineno", None)
    if not isinstance(error, SyntaxError):
        for frame in traceback.extract_tb(error.__traceback__):
            if not frame.filename.startswith(loaders):
                file, line = frame.filename, frame.lineno
                break
    where = f"{file}, line {line}" if line else file
    if isinstance(error, FedlensError):
        return FedlensError(f"{where}: {error}") if line else error
    reason = f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0]
    return FedlensError(f"{where}: the plugin does not import ({reason}).")


# --- dotted paths --------------------------------------------------------------------------------


def is_dotted(name: str) -> bool:
    """Whether a row's name is a path such as `mine.geometric_median`."""
    parts = name.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def may_load(dotted: str) -> bool:
    """Whether the path's module is loaded from a file, or may be imported here."""
    return not _closed or dotted.rpartition(".")[0] in _files


def attribute(dotted: str) -> Callable[..., Any]:
    """The function or class at a dotted path; its module is looked for in this folder first."""
    name, _, last = dotted.rpartition(".")
    module = sys.modules[name] if name in _files else _import(name, Path.cwd(), dotted)
    if not hasattr(module, last):
        own = [key for key, value in vars(module).items()
               if callable(value) and not key.startswith("_")]  # fmt: skip
        options = suggest(last, own) if own else "it has no functions."
        raise FedlensError(f"{dotted}: the module '{name}' has no '{last}': {options}")
    found = getattr(module, last)
    if not (inspect.isroutine(found) or inspect.isclass(found)):
        raise FedlensError(
            f"{dotted} is not a function or class (its type is {type(found).__name__})."
        )
    made: Callable[..., Any] = found
    return made


def _import(name: str, folder: Path, dotted: str) -> ModuleType:
    try:
        with _first_on_path(folder):
            module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise FedlensError(
                f"{dotted}: there is no module '{error.name}' in {folder}, nor is one installed."
            ) from error
        raise _as_sentence(error, name) from error
    except (Exception, SystemExit) as error:
        raise _as_sentence(error, name) from error
    _imported.setdefault(name, folder)
    return module


# --- installed packages --------------------------------------------------------------------------


def load_entry_points() -> bool:
    """Imports what installed packages declare, once; whether there was something to import."""
    global _entry_points_loaded
    if _entry_points_loaded or _closed:
        return False
    _entry_points_loaded = True
    found = entry_points(group=GROUP)
    for one in found:
        try:
            one.load()
        except (Exception, SystemExit) as error:
            package = one.dist.name if one.dist else one.value
            sentence = _as_sentence(error, one.value)
            raise FedlensError(f"The installed package {package}: {sentence}") from error
    return bool(found)


@contextmanager
def only_loaded() -> Iterator[None]:
    """Nothing is imported meanwhile, whatever a config names: of a Flower node, for its server."""
    global _closed
    before, _closed = _closed, True
    try:
        yield
    finally:
        _closed = before


# --- where a function comes from -----------------------------------------------------------------


def of(function: Callable[..., Any]) -> Plugin | None:
    """The file that a function of somebody else's is from; None if it was typed in."""
    name = str(getattr(function, "__module__", None))
    if name in _files:
        return _files[name]
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or name.startswith("fedlens."):
        return None
    try:
        source = Path(file).read_bytes()
    except OSError:
        return None
    return Plugin(Path(file).stem if name in SCRIPTS else name, Path(file).absolute(), source)


def options(plugins: Iterable[Plugin]) -> list[str]:
    """The words of a command that loads these; those that are imported need none."""
    loaded = {plugin.path: plugin for plugin in plugins if _files.get(plugin.module) == plugin}
    return [word for path in loaded for word in ("--plugin", str(path))]


def state() -> tuple[str, ...]:
    """What is loaded from files now, for caches of what was derived from it."""
    return tuple(sorted(plugin.word for plugin in _files.values()))


# --- copies in run folders -----------------------------------------------------------------------


def copy_path(folder: Path, word: str) -> Path:
    """Where a run keeps its copy of a plugin: under its own name, in a folder named by its hash."""
    file, _, digest = word.rpartition(":")
    return folder / FOLDER / digest[:8] / file


def load_copy(folder: Path, word: str) -> None:
    """Loads a run's own copy, if it has one; refuses one that was changed."""
    path = copy_path(folder, word)
    if not path.exists():
        return
    plugin = Plugin(
        word.rpartition(".py:")[0].replace("/", "."), path.absolute(), path.read_bytes()
    )
    if plugin.word != word:
        raise PluginError(f"{path} was changed after the run began: restore the file.")
    _run(plugin)


def load_copies(folder: Path) -> None:
    """Loads all copies that a run has."""
    for path in sorted((folder / FOLDER).glob("*/**/*.py")):
        file = path.relative_to(folder / FOLDER / path.relative_to(folder / FOLDER).parts[0])
        load_copy(folder, f"{file.as_posix()}:{hashlib.sha256(path.read_bytes()).hexdigest()}")


# --- other processes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """What this process has loaded. Unpickling it loads the same, so send it before all else."""

    files: tuple[Plugin, ...]
    modules: tuple[tuple[str, Path], ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_again, (self.files, self.modules)


def loaded() -> Loaded:
    return Loaded(tuple(_files.values()), tuple(_imported.items()))


def _load_again(files: tuple[Plugin, ...], modules: tuple[tuple[str, Path], ...]) -> Loaded:
    for plugin in files:
        _run(plugin)
    for name, folder in modules:
        _import(name, folder, name)
    return Loaded(files, modules)
