"""The command line: a table of commands, each imported only when it is run, and one place where errors become sentences."""

import json
import sys
import tempfile
import traceback
from importlib import import_module

import click

from farflock.node.errors import explained

COMMANDS = {
    "demo": ("farflock.node.commands.demo", "A real local swarm: watch it train, lose a peer, recover."),
    "run": ("farflock.node.commands.run", "Found a run from a manifest."),
    "join": ("farflock.node.commands.join", "Take part in somebody's run."),
    "status": ("farflock.node.commands.status", "What the local node does now, and whom it waits for."),
    "leave": ("farflock.node.commands.leave", "End the local node in good order."),
    "sim": ("farflock.node.commands.sim", "The same run on a simulated network."),
    "export": ("farflock.node.commands.export", "A checkpoint as a Hugging Face folder."),
    "generate": ("farflock.node.commands.generate", "Sample text from a checkpoint."),
}


class _Lazy(click.Group):
    """A group that imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(COMMANDS[name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, short) for name, (_, short) in COMMANDS.items()])


@click.group(cls=_Lazy)
@click.version_option(package_name="farflock")
def cli() -> None:
    """Train one model together on machines that are far apart."""


def main() -> None:
    """Run the command line; exit codes: 0 ok, 1 failure, 2 usage, 3 refused by the run, 130 interrupted."""
    try:
        cli.main(standalone_mode=False)
        code = 0
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = _say("interrupted; what was running has been ended", 130)
    except Exception as error:  # the border of the program: every error ends as one sentence
        known = explained(error)
        code = _say(str(known), known.exit_code) if known else _say(_unexpected(error), 1)
    sys.exit(code)


def _unexpected(error: Exception) -> str:
    with tempfile.NamedTemporaryFile("w", prefix="farflock-", suffix=".log", delete=False) as log:
        traceback.print_exception(error, file=log)
    return f"unexpected {type(error).__name__}: {error}; this is a fault of ours, please report it with {log.name}"


def _say(sentence: str, code: int) -> int:
    sys.stderr.write(f"farflock: {sentence}\n")
    if "--json" in sys.argv:
        sys.stdout.write(json.dumps({"error": sentence, "exit_code": code}) + "\n")
    return code


if __name__ == "__main__":
    main()
