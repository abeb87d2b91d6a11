"""The command line: a table of commands, each imported only when it runs.

This is the one place where errors become sentences and exit codes.
"""

import contextlib
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import FrameType

import click

from farflock import __version__
from farflock.node.cli.output import Output
from farflock.node.errors import INTERRUPTED, Terminated, explained
from farflock.node.extras import absent

TEARDOWN_S = 3.0  # for threads to end, once a command has said its last word
COMMANDS = {  # name: (module:attribute, short help); nothing is imported until a command runs
    "demo": (
        "farflock.node.cli.commands.demo:command",
        "Watch a swarm train on this machine, lose a peer, and recover.",
    ),
    "join": ("farflock.node.cli.commands.join:command", "Join a run by its invite."),
    "leave": (
        "farflock.node.cli.commands.leave:command",
        "Stop the node on this machine; it saves first.",
    ),
    "run": ("farflock.node.cli.commands.run:command", "Start a new run from a manifest."),
    "status": (
        "farflock.node.cli.commands.status:command",
        "Show what a node is doing, or look at a run.",
    ),
    "list": ("farflock.node.cli.commands.list:command", "Show your runs on this machine."),
    "log": (
        "farflock.node.cli.commands.log:command",
        "Print what the node has measured.",
    ),
    "generate": ("farflock.node.cli.commands.generate:command", "Sample text from a checkpoint."),
    "export": (
        "farflock.node.cli.commands.export:command",
        "Convert a checkpoint to a Hugging Face folder.",
    ),
    "evaluate": (
        "farflock.node.cli.commands.evaluate:command",
        "Measure a model on text that it was not trained on.",
    ),
    "data": (
        "farflock.node.cli.commands.data:command",
        "Turn texts into data to train on.",
    ),
    "tokenizer": (
        "farflock.node.cli.commands.tokenizer:command",
        "Learn a tokenizer from texts.",
    ),
    "sim": ("farflock.node.cli.commands.sim:command", "Run a manifest on a simulated network."),
    "reproduce": (
        "farflock.experiments.reproduce.command:command",
        "Re-run experiments from papers and compare.",
    ),
    "bench": (
        "farflock.experiments.bench.command:command",
        "Measure speed, memory and bytes against a baseline.",
    ),
}
GROUPS = {  # title in the help: commands
    "Take part": ("demo", "join", "leave"),
    "Start and watch a run": ("run", "status", "list", "log"),
    "Prepare a run": ("tokenizer", "data"),
    "Use the model": ("generate", "evaluate", "export"),
    "Study": ("sim", "reproduce", "bench"),
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
        column = max(map(len, COMMANDS))  # the same in each group
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(column), COMMANDS[name][1]) for name in names])


def _show_version(ctx: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted:
        from farflock.swarm.frame import VERSION as PROTOCOL

        Output(False).line(f"farflock {__version__}, protocol {PROTOCOL}")
        ctx.exit()


@click.group(cls=_Lazy, epilog="First time? Run `farflock demo`.")
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and the protocol that it speaks.",
)
def cli() -> None:
    """Train one model together on machines that are far apart.

    `farflock COMMAND --help` explains a command.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Exit codes: 0 ok, 1 failure, 2 usage, 3 refused by the run, 130 interrupted, 143 terminated.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    with _signals_raise():
        code = _run(given, Output("--json" in given))
    if arguments is None:  # the process has nothing else to do
        _end_within(TEARDOWN_S, code)
    sys.exit(code)


def _end_within(seconds: float, code: int) -> None:
    """End the process after this long, whatever its threads still compute or wait for."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


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
        return out.failure(_with_help(error), error.exit_code)
    except Terminated as error:
        return out.failure(
            "asked to stop; everything that was running has stopped", error.exit_code
        )
    except (click.Abort, KeyboardInterrupt):
        return out.failure("interrupted; everything that was running has stopped", INTERRUPTED)
    except BrokenPipeError:  # the reader has closed the pipe; Python would complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # the edge of the program: every error becomes one sentence
        known = absent(error) if isinstance(error, ModuleNotFoundError) else explained(error)
        return (
            out.failure(str(known), known.exit_code)
            if known
            else out.failure(_unexpected(error), 1)
        )


def _with_help(error: click.ClickException) -> str:
    """Return click's message and, for wrong usage, the help command that explains the right
    usage."""
    sentence = error.format_message().rstrip(".")
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return sentence
    return f"{sentence}; see `{error.ctx.command_path} --help`"


def _unexpected(error: Exception) -> str:
    attach = ""
    with (
        contextlib.suppress(OSError),
        tempfile.NamedTemporaryFile("w", prefix="farflock-", suffix=".log", delete=False) as log,
    ):
        traceback.print_exception(error, file=log)
        attach = f" and attach {log.name}"
    return (
        f"unexpected {type(error).__name__}: {error}; this is a bug in Farflock,"
        f" please report it{attach}"
    )
