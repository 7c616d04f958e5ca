"""The command line: parse, one API call, write. Heavy imports happen inside commands."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, NoReturn

import typer

from mxdiag import __version__
from mxdiag.cli.diff import diff
from mxdiag.cli.env import env
from mxdiag.cli.gate import gate
from mxdiag.cli.impact import impact
from mxdiag.cli.merge import merge
from mxdiag.cli.output import complain, prepare_streams, quiet_stdout, was_interrupted
from mxdiag.cli.recommend import recommend
from mxdiag.cli.report import report
from mxdiag.cli.sample import sample
from mxdiag.cli.scan import scan
from mxdiag.cli.schema import schema
from mxdiag.cli.show import show
from mxdiag.errors import MxdiagError

EXIT_USAGE, EXIT_INTERRUPT = 2, 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # half the time of --help
    context_settings={"help_option_names": ["-h", "--help"]},
    help="X-ray a model's 4-bit error: scale bias, deadzone truncation and grid noise of every "
    "linear layer, for weights, activations and gradients.",
)
for command in (scan, impact, recommend, report, gate, diff, merge, show, schema, sample, env):
    app.command()(command)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"mxdiag {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error. May stand anywhere."),
    ] = False,
) -> None:
    """Options of every command. `main` takes --debug out of the arguments before they get here."""


def stop() -> NoReturn:
    """Say that it was interrupted, and exit; a second Ctrl-C changes nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    complain("interrupted")
    sys.exit(EXIT_INTERRUPT)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 over budget, 2 usage or input error, 130 Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        prepare_streams()
        app(arguments, prog_name="mxdiag")
    except MxdiagError as error:
        if debug:
            raise
        if was_interrupted():  # and some library reported it as an error of the model
            stop()
        complain(f"error: {error}")
        sys.exit(EXIT_USAGE)
    except KeyboardInterrupt:
        if debug:
            raise
        stop()
    except SystemExit as end:
        if end.code == EXIT_INTERRUPT:  # typer's own answer to Ctrl-C, without a word
            stop()
        raise
    except BrokenPipeError:
        quiet_stdout()
    except Exception as error:  # a fault of mxdiag's own: 1 would read as "over budget"
        if debug:
            raise
        if was_interrupted():
            stop()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        complain(f"error: mxdiag failed: {text[:300]}. Run it with --debug, and report it.")
        sys.exit(EXIT_USAGE)
