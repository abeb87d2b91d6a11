"""Options that `run` and `join` share: what this machine contributes to the run."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from farflock.node.process.host import OwnPlace
    from farflock.node.process.network import MachineOptions
    from farflock.node.sinks.choice import Endpoint, LogOptions
    from farflock.swarm.addresses import LinkAddress

MAX_CODEC_THREADS = 256

Command = TypeVar("Command", bound=Callable[..., Any])
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt])?b?", re.ASCII | re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_COUNT = re.compile(r"[1-9]\d{0,8}", re.ASCII)
_TIME = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*([sm])?", re.ASCII)
_SHOWN = 64


def _host(ctx: click.Context, option: click.Parameter, host: str | None) -> str | None:
    from farflock.node.process.host import bound_hosts

    if host is not None:
        bound_hosts(host, "--host")
    return host


def _advertise(
    ctx: click.Context, option: click.Parameter, texts: tuple[str, ...]
) -> "tuple[LinkAddress, ...]":
    from farflock.node.process.host import advertised

    return advertised(texts, "--advertise")


def size_in_bytes(ctx: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Return the bytes that a size such as 20GB says; anything else is a usage error."""
    if text is None:
        return None
    spelt = _SIZE.fullmatch(text.strip())
    if spelt is None or not (size := int(float(spelt[1]) * _FACTORS[(spelt[2] or "").lower()])):
        raise click.BadParameter(
            f"{text[:_SHOWN]!r} is not a size; write it as in 20GB, 500MB or 1.5TB"
        )
    return size


def _memory(ctx: click.Context, option: click.Parameter, text: str | None) -> None:
    from farflock.node.machine import limit_memory

    limit_memory(size_in_bytes(ctx, option, text))


def _line_rate(ctx: click.Context, option: click.Parameter, text: str | None) -> float | None:
    from farflock.node.process.host import line_rate

    return line_rate(text, option.opts[0])


def _cpu(ctx: click.Context, option: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    spelt = re.fullmatch(r"([0-9]{1,3})%", text.strip())
    if spelt is None or not 0 < int(spelt[1]) <= 100:
        raise click.BadParameter(f"{text[:_SHOWN]!r} is no share; write 1% to 100%")
    return int(spelt[1]) / 100


def _seconds(ctx: click.Context, option: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    spelt = _TIME.fullmatch(text.strip())
    if spelt is None or not (seconds := float(spelt[1]) * (60.0 if spelt[2] == "m" else 1.0)):
        raise click.BadParameter(f"{text[:_SHOWN]!r} is not a time; write it as in 30s or 2m")
    return seconds


def _micro_batch(ctx: click.Context, option: click.Parameter, text: str) -> int | None:
    if text == "auto":
        return None
    if not _COUNT.fullmatch(text):
        raise click.BadParameter(
            f"{text[:_SHOWN]!r} is not a number of sequences; write it as in 4, or auto"
        )
    return int(text)


def _logs(ctx: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...]:
    from farflock.node.sinks.choice import parse_logs

    return () if text is None else parse_logs(text)


def _metrics(ctx: click.Context, option: click.Parameter, text: str | None) -> "Endpoint | None":
    from farflock.node.sinks.choice import parse_address

    return None if text is None else parse_address(text)


def device_option(
    default: str | None = "auto", note: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option that names a device; `note` ends its help."""
    named = "Device that computes: cpu, cuda, cuda:N, mps, xpu, or the best of this machine (auto)"
    return click.option(
        "--device",
        default=default,
        show_default=default is not None,
        metavar="DEVICE",
        help=f"{named}{note}.",
    )


data_option = click.option(
    "--data",
    multiple=True,
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the run's prepared data, which is read in place; name several for a mix.",
)
STEP_OPTIONS = (
    click.option(
        "--checkpointing",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        show_default=True,
        help="Keep only what enters each layer, and compute the layer again for its gradients: a"
        " third slower, in much less memory (auto: where an accelerator has no room for one"
        " sequence without it).",
    ),
    click.option(
        "--compile",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        show_default=True,
        help="Compile the model's layers with torch.compile, which takes a minute at the start"
        " (auto: on CUDA and XPU devices).",
    ),
    click.option(
        "--moments",
        type=click.Choice(["fp32", "bf16", "int8"]),
        default="fp32",
        show_default=True,
        help="Type of AdamW's two moments of each weight, which take 8, 4 or 2 bytes of the 16 that"
        " a weight takes while it trains.",
    ),
)
_MACHINE = (
    click.option(
        "--folder",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder of this node's files (default: one for the run, in the user's data folder).",
    ),
    click.option(
        "--threads",
        type=click.IntRange(1, 256),
        default=1,
        show_default=True,
        help="CPU threads to train with.",
    ),
    click.option(
        "--cpu",
        metavar="PERCENT",
        callback=_cpu,
        help="Share of the time of its CPU threads that the node may take, as in 50%; the folder"
        " remembers it (default: what the folder remembers, else 100%).",
    ),
    click.option(
        "--up",
        metavar="RATE",
        callback=_line_rate,
        help="What the node may send to members, as in 5mbit, or all; the folder remembers it"
        " (default: what the folder remembers, else all).",
    ),
    click.option(
        "--down",
        metavar="RATE",
        callback=_line_rate,
        help="What the node may read of what members send, as in 20mbit, or all; the folder"
        " remembers it (default: what the folder remembers, else all).",
    ),
    click.option(
        "--memory",
        metavar="SIZE",
        callback=_memory,
        expose_value=False,
        help="Memory that the node may take, as in 12GB (default: what is free on the machine, and"
        " in the container or job around it).",
    ),
    click.option(
        "--codec-threads",
        type=click.IntRange(1, MAX_CODEC_THREADS),
        default=1,
        show_default=True,
        help="CPU threads that encode what is sent and check what comes back.",
    ),
    click.option(
        "--host",
        callback=_host,
        help="Where to listen: an address of this machine, 0.0.0.0 or :: for all of them (:: with"
        " IPv6), an interface, or a host name (default: 127.0.0.1, for this machine alone; with"
        " --advertise, all).",
    ),
    click.option(
        "--advertise",
        multiple=True,
        metavar="ADDRESS:PORT",
        callback=_advertise,
        help="Publish this address, at which a router, a cloud or a container's host passes on"
        " PORT and the next one to --port and the next one.",
    ),
    click.option(
        "--port",
        type=click.IntRange(0, 65534),
        default=0,
        help="Port for traffic between members, which takes the next one too (default: any free"
        " ones, or those of --advertise).",
    ),
    click.option(
        "--dht-port",
        type=click.IntRange(0, 65535),
        default=0,
        help="Port for peer discovery, the DHT (default: any free one).",
    ),
    data_option,
    click.option(
        "--disk",
        metavar="SIZE",
        callback=size_in_bytes,
        help="Room that this node's files may take in all, as in 20GB: checkpoints, snapshots for"
        " newcomers, past rounds, and shards of prepared data that come from other members, which"
        " take what is left (default: what the run needs, and 20 GB of shards).",
    ),
    click.option(
        "--checkpoint-every",
        type=click.FloatRange(1, 86400),
        default=600.0,
        show_default=True,
        help="Seconds between checkpoints.",
    ),
    click.option(
        "--grace",
        metavar="TIME",
        callback=_seconds,
        help="Time from a request to stop to the end of the process, as in 30s or 2m: what Slurm or"
        " a provider of spot machines gives. A checkpoint that would take longer is not begun"
        " (default: as long as the disk takes something).",
    ),
    click.option(
        "--keep",
        type=click.IntRange(min=1),
        default=3,
        show_default=True,
        help="Checkpoints to keep: the newest ones, of each stage if there are stages.",
    ),
    click.option(
        "--keep-bytes",
        metavar="SIZE",
        callback=size_in_bytes,
        help="Keep fewer of them if they take more than this, as in 20GB; the newest intact one"
        " always stays.",
    ),
    click.option(
        "--role",
        default="auto",
        show_default=True,
        metavar="ROLE",
        help="In a run whose model is split into stages: trainer, replica (all stages),"
        " stage (the one with the fewest servers), stage:N, or auto.",
    ),
    device_option(),
    *STEP_OPTIONS,
    click.option(
        "--micro-batch",
        default="auto",
        show_default=True,
        metavar="N",
        callback=_micro_batch,
        help="Sequences of a batch that are computed at once: N, or on an accelerator as many as"
        " fit its memory (auto). Fewer take less memory; what a step learns is the same.",
    ),
    click.option(
        "--outer",
        type=click.Choice(["auto", "device", "host", "disk"]),
        default="auto",
        show_default=True,
        help="Where the method keeps its own copies of the model and computes with them: in the"
        " memory of the device that trains (device), in this machine's memory (host), in files of"
        " the folder that are mapped into memory (disk), or in the first of these with room"
        " (auto).",
    ),
    click.option(
        "--no-listen",
        is_flag=True,
        help="Accept no incoming connections (behind NAT or a firewall).",
    ),
    click.option(
        "--log",
        "logs",
        metavar="NAMES",
        callback=_logs,
        help="Where the node's measures go beside measures.csv in its folder: tensorboard, wandb,"
        " or both as in tensorboard,wandb.",
    ),
    click.option(
        "--log-every",
        type=click.FloatRange(1, 3600),
        default=10.0,
        show_default=True,
        help="Seconds between two measures.",
    ),
    click.option(
        "--metrics",
        metavar="[ADDRESS:]PORT",
        callback=_metrics,
        help="Let Prometheus fetch the measures at this address over HTTP, as in 127.0.0.1:9464;"
        " without an address, from this machine alone.",
    ),
)


def machine_options(command: Command) -> Command:
    """Add the options to a command; the help lists them in this order."""
    for option in reversed(_MACHINE):
        command = option(command)
    return command


def machine_of(options: Mapping[str, Any]) -> "MachineOptions":
    """Return the machine's contribution that these options describe; raise `Usage` if it has no
    such device."""
    import os

    from farflock.node.model.device import choose, require_outer
    from farflock.node.model.step_options import StepOptions
    from farflock.node.process.network import MachineOptions
    from farflock.node.process.torchrun import place_of as rank_of
    from farflock.node.state.paths import RunFolder

    rank = rank_of(os.environ)
    device = choose(options["device"], None if rank is None else rank.local_rank)
    if options["outer"] == "device":
        require_outer(device, alone=rank is None)
    return MachineOptions(
        folder=RunFolder.at(options["folder"]),
        place=place_of(options),
        threads=options["threads"],
        codec_threads=options["codec_threads"],
        checkpoint_s=options["checkpoint_every"],
        keep=options["keep"],
        keep_bytes=options["keep_bytes"],
        role=options["role"],
        outer=options["outer"],
        data=options["data"],
        disk=options["disk"],
        device=device,
        step_options=StepOptions(
            options["checkpointing"],
            options["compile"],
            options["moments"],
            options["micro_batch"],
        ),
    )


def place_of(options: Mapping[str, Any]) -> "OwnPlace":
    """Return where these options let the machine listen."""
    from farflock.node.process.host import OwnPlace, Shares

    return OwnPlace(
        options["host"],
        options["port"],
        options["dht_port"],
        options["no_listen"],
        options["advertise"],
        Shares(options["up"], options["down"], options["cpu"]),
    )


def grace_of(options: Mapping[str, Any]) -> float | None:
    """Return the seconds from a request to stop to the end, if these options name them."""
    grace_s: float | None = options["grace"]
    return grace_s


def logs_of(options: Mapping[str, Any]) -> "LogOptions":
    """Return where these options let the node's measures go."""
    from farflock.node.sinks.choice import LogOptions

    return LogOptions(options["logs"], options["metrics"], options["log_every"])
