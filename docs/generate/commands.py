"""docs/reference/commands.md: every command and option, read from click."""

import inspect

import click
from generate.page import code, page, table

from farflock.experiments.quality.command import command as quality
from farflock.node.cli.main import COMMANDS, cli

INTRO = """
Every command has `--help` and `--json`. With `--json`, words go to standard error, and the last
line of standard output is one JSON object; an error is the object `{"error": SENTENCE,
"exit_code": NUMBER}`.

| exit code | meaning |
|---|---|
| 0 | done; also a node that was asked to end by `farflock leave` and saved |
| 1 | failure on this machine or on the network |
| 2 | an argument, an option or a value of the manifest is impossible |
| 3 | the run refuses this machine, this file or this version |
| 130 | ended by Ctrl-C |
| 129, 143 | ended by a closing terminal or by SIGTERM, and its last step is not saved |

Every error is one sentence on standard error. [Troubleshooting](../troubleshooting.md) lists
those that people meet most.
"""


def commands() -> dict[str, click.Command]:
    """Return the commands by name, those of groups and `bench quality` included."""
    found: dict[str, click.Command] = {}
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        if isinstance(command, click.Group):
            found |= {f"{name} {part}": each for part, each in command.commands.items()}
        else:
            found[name] = command
    return {**found, "bench quality": quality}


def make() -> str:
    """Return the page."""
    sections = {f"farflock {name}": _section(name, each) for name, each in commands().items()}
    return page("Commands", INTRO, sections)


def _section(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"farflock {name}")
    usage = " ".join(command.collect_usage_pieces(context))
    options = [each for each in command.params if isinstance(each, click.Option)]
    rows = [_row(each, context) for each in options]
    parts = [
        f"```text\nfarflock {name} {usage}\n```",
        _help(command),
        table(("option", "value", "default", "meaning"), rows),
    ]
    return "\n\n".join(parts)


def _help(command: click.Command) -> str:
    """Return the text of `--help`; a paragraph that click does not wrap becomes a code block."""
    text, _, examples = inspect.cleandoc(command.help or "").partition("\b\nExamples:\n")
    if not examples:
        return text
    return f"{text}Examples:\n\n```sh\n{inspect.cleandoc(examples)}\n```"


def _row(option: click.Option, context: click.Context) -> tuple[str, ...]:
    value = "" if option.is_flag else _value(option, context)
    return ", ".join(map(code, option.opts)), value, _default(option), option.help or _plain(option)


def _plain(option: click.Option) -> str:
    """Return a description of an option whose name is all there is to say."""
    return f"The {(option.name or '').replace('_', ' ')}."


def _value(option: click.Option, context: click.Context) -> str:
    kind = option.type
    if option.metavar:
        return code(option.metavar)
    if isinstance(kind, click.Choice):
        return ", ".join(code(choice) for choice in kind.choices)
    if isinstance(kind, click.IntRange | click.FloatRange):
        number = "whole number" if isinstance(kind, click.IntRange) else "number"
        return number + _range(kind)
    return {"text": "text", "file": "file", "directory": "folder"}.get(kind.name, kind.name)


def _range(kind: "click.IntRange | click.FloatRange") -> str:
    if kind.min is not None and kind.max is not None:
        return f", {kind.min:,} to {kind.max:,}"
    return "" if kind.min is None else f", {kind.min:,} or more"


def _default(option: click.Option) -> str:
    value = option.default
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return code(str(value).replace("\n", r"\n")) if plain and not option.is_flag else ""
