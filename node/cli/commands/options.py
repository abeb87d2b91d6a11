"""Options that `run` and `join` share: what this machine contributes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from farflock.node.process.network import MachineOptions

Command = TypeVar("Command", bound=Callable[..., Any])


def machine_options(command: Command) -> Command:
    """Add the options."""
    for option in (
        click.option(
            "--folder",
            type=click.Path(file_okay=False, path_type=Path),
            help="Where this node's files are.",
        ),
        click.option(
            "--threads",
            type=click.IntRange(1, 256),
            default=1,
            show_default=True,
            help="Threads of torch.",
        ),
        click.option(
            "--host",
            default="127.0.0.1",
            show_default=True,
            help="Address to listen on; loopback unless told.",
        ),
        click.option(
            "--port", type=click.IntRange(0, 65534), default=0, help="Port of the links (0: any)."
        ),
        click.option(
            "--dht-port",
            type=click.IntRange(0, 65535),
            default=0,
            help="Port of the directory (0: any).",
        ),
        click.option(
            "--checkpoint-every",
            type=click.FloatRange(1, 86400),
            default=600.0,
            show_default=True,
            help="Seconds from one checkpoint to the next; the last three are kept.",
        ),
        click.option(
            "--role",
            default="auto",
            show_default=True,
            metavar="ROLE",
            help="In a run of stages: trainer, replica (all stages), stage (the one that has the fewest), stage:N, or auto.",
        ),
        click.option(
            "--no-listen", is_flag=True, help="Only dial out: for machines that nobody can reach."
        ),
    ):
        command = option(command)
    return command


def machine_of(options: Mapping[str, Any]) -> "MachineOptions":
    """The machine that these options describe."""
    from farflock.node.process.network import MachineOptions
    from farflock.node.state.paths import RunFolder

    return MachineOptions(
        folder=RunFolder.at(options["folder"]),
        host=options["host"],
        port=options["port"],
        dht_port=options["dht_port"],
        threads=options["threads"],
        client_mode=options["no_listen"],
        checkpoint_s=options["checkpoint_every"],
        role=options["role"],
    )
