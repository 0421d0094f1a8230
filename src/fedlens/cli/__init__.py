"""The `fedlens` command: parse, call, print. Torch is loaded only by commands that compute."""

import errno
import logging
import sys
from typing import Annotated

import click
import typer
from rich.console import Console
from rich.logging import RichHandler

from fedlens.cli.commands import (
    arithmetic,
    data,
    export,
    flower,
    masks,
    new,
    report,
    runs,
    suites,
    tune,
    weights,
)
from fedlens.cli.shared import PLAIN, Commands, check_words
from fedlens.errors import FedlensError, shown
from fedlens.runtime.logs import logging_to
from fedlens.runtime.shared_machine import choose_waiting
from fedlens.runtime.stop import Interrupted

__all__ = ["app", "main"]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
INTERRUPTED = 75  # EX_TEMPFAIL: the same command resumes

app = Commands(
    help="Train models with federated learning, and study them with task arithmetic.",
    epilog="Start with `fedlens suite quick`: it needs no download and takes minutes on a laptop. "
    "`fedlens --install-completion` lets the Tab key complete commands and options.",
    no_args_is_help=True,
    suggest_commands=False,  # click does it, too
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(runs.app)  # without a name: its commands are at the top level
app.add_typer(suites.app)
app.add_typer(new.app)
app.add_typer(tune.app)
app.add_typer(report.app)
app.add_typer(export.app)
app.add_typer(arithmetic.app, name="arithmetic")
app.add_typer(data.app, name="data")
app.add_typer(flower.app, name="flower")
app.add_typer(masks.app, name="masks")
app.add_typer(weights.app, name="weights")


def _print_version(wanted: bool) -> None:
    if wanted:
        from fedlens import __version__

        print(f"fedlens {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Options of `fedlens` itself."""


def main() -> None:
    """Errors are a sentence and exit code 2, also of words that click refuses.

    An interrupted command exits with 75.
    """
    choose_waiting()  # first: no command has loaded torch yet
    console = Console(stderr=True)
    with logging_to(_progress_log(console)):
        try:
            check_words(sys.argv[1:])
            sys.exit(app(prog_name="fedlens", standalone_mode=False) or 0)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(2)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "fedlens"
            message = error.format_message()
            end = "" if message.endswith((".", "?")) else "."
            console.print(f"error: {message}{end} See `{command} --help`.", style="red", **PLAIN)
            sys.exit(2)
        except FedlensError as error:
            console.print(f"error: {error}", style="red", **PLAIN)
            sys.exit(2)
        except OSError as error:
            if error.errno in NO_ROOM:
                problem = f"{error}: free some space, then run the same command again."
            elif error.filename is not None:  # too long a name, a file in place of a folder, …
                problem = (
                    f"{shown(error.filename)} cannot be used ({error.strerror}): check the path "
                    "and its permissions."
                )
            else:
                raise
            console.print(f"error: {problem}", style="red", **PLAIN)
            sys.exit(2)
        except Interrupted as reason:
            console.print(f"Stopped: {reason}", **PLAIN)
            sys.exit(INTERRUPTED)


def _progress_log(console: Console) -> logging.Handler:
    """Log to stderr; `main` prints errors."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, show_level=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(lambda record: record.levelno < logging.ERROR)
    return handler
