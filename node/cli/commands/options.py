"""Options that `run` and `join` share: what this machine contributes to the run."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from farflock.node.cli.commands.dry_run import bytes_per_s

if TYPE_CHECKING:
    from farflock.node.process.network import MachineOptions

MAX_CODEC_THREADS = 256
RELAY_SHARE = 4  # by default, forwarding takes this part of an uplink that is given

Command = TypeVar("Command", bound=Callable[..., Any])
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt])?b?", re.ASCII | re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_COUNT = re.compile(r"[1-9]\d{0,8}", re.ASCII)
_SHOWN = 64


def _host(ctx: click.Context, option: click.Parameter, host: str) -> str:
    from farflock.node.process.host import require_host

    return require_host(host, "--host")


def size_in_bytes(ctx: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Return the bytes of a size such as 20GB, for an option of click; None if it is not given."""
    if text is None:
        return None
    spelt = _SIZE.fullmatch(text.strip())
    if spelt is None or not (size := int(float(spelt[1]) * _FACTORS[(spelt[2] or "").lower()])):
        raise click.BadParameter(
            f"{text[:_SHOWN]!r} is not a size; write it as in 20GB, 500MB or 1.5TB"
        )
    return size


def _micro_batch(ctx: click.Context, option: click.Parameter, text: str) -> int | None:
    if text == "auto":
        return None
    if not _COUNT.fullmatch(text):
        raise click.BadParameter(
            f"{text[:_SHOWN]!r} is not a number of sequences; write it as in 4, or auto"
        )
    return int(text)


def _relay(ctx: click.Context, option: click.Parameter, text: str | None) -> float | None:
    """Return the bytes a second that are forwarded for others; None if it is not said."""
    if text is None:
        return None
    if text == "no":
        return 0.0
    try:
        return bytes_per_s(ctx, option, text)
    except click.BadParameter:
        raise click.BadParameter(
            f"{text[:_SHOWN]!r} is not a rate; write it as 20mbit or 1.5gbit, or no"
        ) from None


def _relay_rate(relay: float | None) -> float | None:
    """Return the rate that was asked for, or else a share of the uplink, if that was given."""
    ctx = click.get_current_context(silent=True)
    if relay is not None or ctx is None or "uplink" not in ctx.params:
        return relay
    if ctx.get_parameter_source("uplink") is not ParameterSource.COMMANDLINE:
        return None  # the default is an assumption of `--dry-run`
    return float(ctx.params["uplink"]) / RELAY_SHARE


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
        help="Folder of this node's files (default: in the user's data folder).",
    ),
    click.option(
        "--threads",
        type=click.IntRange(1, 256),
        default=1,
        show_default=True,
        help="CPU threads to train with.",
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
        default="127.0.0.1",
        show_default=True,
        callback=_host,
        help="IP address of this machine that members elsewhere can reach.",
    ),
    click.option(
        "--port",
        type=click.IntRange(0, 65534),
        default=0,
        help="Port for traffic between members (default: any free one).",
    ),
    click.option(
        "--dht-port",
        type=click.IntRange(0, 65535),
        default=0,
        help="Port for peer discovery, the DHT (default: any free one).",
    ),
    click.option(
        "--checkpoint-every",
        type=click.FloatRange(1, 86400),
        default=600.0,
        show_default=True,
        help="Seconds between checkpoints.",
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
        "--base-precision",
        type=click.Choice(["fp32", "bf16", "int8", "nf4"]),
        default="fp32",
        show_default=True,
        help="Precision in which this machine holds that model; 8 and 4 bits need the extra"
        " `quantized`.",
    ),
    click.option(
        "--data-cache",
        default="20GB",
        show_default=True,
        metavar="SIZE",
        callback=size_in_bytes,
        help="Disk space for data that is downloaded; what was used longest ago goes first.",
    ),
    click.option(
        "--relay",
        metavar="RATE",
        callback=_relay,
        help="Forward at most this much for members that cannot reach each other, as in 20mbit,"
        " or no (default: a quarter of --uplink where it is given).",
    ),
    click.option(
        "--no-listen",
        is_flag=True,
        help="Accept no incoming connections (behind NAT or a firewall).",
    ),
)


base_option = click.option(
    "--base",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Of a run of adapters, the folder with the model that they belong to, if it is not where"
    " it was.",
)


_PLACES = (
    click.option(
        "--data",
        multiple=True,
        metavar="PLACE",
        help="Folder or web address (https://…) with a copy of the run's data, looked at before"
        " other members are asked; may be given several times.",
    ),
    click.option(
        "--base",
        multiple=True,
        metavar="DIR",
        help="Folder with the model beside which a run trains adapters, looked at before members"
        " are asked for it; may be given several times.",
    ),
)


def machine_options(command: Command) -> Command:
    """Add the options to a command; the help lists them in this order."""
    for option in reversed((*_MACHINE, *_PLACES)):
        command = option(command)
    return command


def own_machine_options(command: Command) -> Command:
    """Add the options but those that name copies of what a run needs, to a command that has these
    from its user."""
    for option in reversed(_MACHINE):
        command = option(command)
    return command


def machine_of(options: Mapping[str, Any]) -> "MachineOptions":
    """Return the machine's contribution that these options describe; raise `Usage` if it has no
    such device."""
    import os

    from farflock.node.model.device import choose, require_outer
    from farflock.node.model.step_options import StepOptions
    from farflock.node.process.network import CacheOptions, MachineOptions
    from farflock.node.process.torchrun import place_of
    from farflock.node.state.paths import RunFolder

    place = place_of(os.environ)
    device = choose(options["device"], None if place is None else place.local_rank)
    if options["outer"] == "device":
        require_outer(device, alone=place is None)
    return MachineOptions(
        folder=RunFolder.at(options["folder"]),
        host=options["host"],
        port=options["port"],
        dht_port=options["dht_port"],
        threads=options["threads"],
        codec_threads=options["codec_threads"],
        client_mode=options["no_listen"],
        checkpoint_s=options["checkpoint_every"],
        keep=options["keep"],
        keep_bytes=options["keep_bytes"],
        role=options["role"],
        outer=options["outer"],
        device=device,
        data=tuple(options["data"]),
        cache=CacheOptions(max_bytes=options["data_cache"]),
        relay_bytes_per_s=_relay_rate(options["relay"]),
        step_options=StepOptions(
            options["checkpointing"],
            options["compile"],
            options["moments"],
            options["micro_batch"],
            options["base_precision"],
        ),
        base=tuple(map(Path, options["base"])),
    )


def with_folders(
    machine: "MachineOptions", data: Path | None, model: Path | None
) -> "MachineOptions":
    """Return the machine with the folders that the manifest's file names: one more of prepared
    data, and that of the model that the run starts from."""
    first = () if data is None else (str(data),)
    return replace(machine, data=(*first, *machine.data), model=model)
