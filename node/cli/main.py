"""The command line: a table of commands, each imported only when run, and the one place where
errors become sentences.
"""

import contextlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import FrameType

import click

from farflock import __version__
from farflock.node.cli.output import Output
from farflock.node.errors import INTERRUPTED, Terminated, explained

COMMANDS = {
    "demo": (
        "farflock.node.cli.commands.demo:command",
        "A real local swarm: watch it train, lose a peer, recover.",
    ),
    "run": ("farflock.node.cli.commands.run:command", "Found a run from a manifest."),
    "join": ("farflock.node.cli.commands.join:command", "Take part in somebody's run."),
    "status": (
        "farflock.node.cli.commands.status:command",
        "What the local node does now, and whom it waits for.",
    ),
    "leave": ("farflock.node.cli.commands.leave:command", "End the local node in good order."),
    "sim": ("farflock.node.cli.commands.sim:command", "The same run on a simulated network."),
    "reproduce": (
        "farflock.experiments.reproduce.command:command",
        "Papers' claims, put to the test at your scale.",
    ),
    "bench": (
        "farflock.experiments.bench.command:command",
        "The scoreboard: what it costs, beside a yardstick.",
    ),
    "export": (
        "farflock.node.cli.commands.export:command",
        "A checkpoint as a Hugging Face folder.",
    ),
    "generate": ("farflock.node.cli.commands.generate:command", "Sample text from a checkpoint."),
}


class _Lazy(click.Group):
    """A group that imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, short) for name, (_, short) in COMMANDS.items()])


@click.group(cls=_Lazy)
@click.version_option(__version__)
def cli() -> None:
    """Train one model together on machines that are far apart."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exit codes: 0 ok, 1 failure, 2 usage, 3 refused by the run, 130 interrupted, 143 terminated."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    with _signals_raise():
        sys.exit(_run(given, Output("--json" in given)))


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM and SIGHUP, as Ctrl-C raises `KeyboardInterrupt`."""

    def terminated(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    ours = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in ours:
        signal.signal(number, terminated)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _run(arguments: list[str], out: Output) -> int:
    try:
        ended = cli.main(arguments, prog_name="farflock", standalone_mode=False)
        return ended if isinstance(ended, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        where = (
            f" (see `{error.ctx.command_path} --help`)"
            if isinstance(error, click.UsageError) and error.ctx
            else ""
        )
        return out.failure(f"{error.format_message()}{where}", error.exit_code)
    except Terminated as error:
        return out.failure("asked to end; what was running has been ended", error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return out.failure("interrupted; what was running has been ended", INTERRUPTED)
    except BrokenPipeError:  # the reader has left; Python would complain again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # the border of the program: every error ends as one sentence
        known = explained(error)
        return (
            out.failure(str(known), known.exit_code)
            if known
            else out.failure(_unexpected(error), 1)
        )


def _unexpected(error: Exception) -> str:
    with tempfile.NamedTemporaryFile("w", prefix="farflock-", suffix=".log", delete=False) as log:
        traceback.print_exception(error, file=log)
    return f"unexpected {type(error).__name__}: {error}; this is a fault of ours, please report it with {log.name}"
