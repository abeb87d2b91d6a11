"""Measures in Weights & Biases, as a run of the node."""

import os

import wandb

from farflock.node.errors import Usage
from farflock.node.sinks.feed import OpenSink, Origin
from farflock.node.sinks.measures import Measures, numbers

PROJECT = "farflock"
_SHOWN = 8  # characters of ids in a name
_SETTINGS = {
    "init_timeout": 60.0,  # s
    "finish_timeout": 8.0,  # s, less than a node waits; the rest stays on disk for `wandb sync`
    "finish_timeout_raises": True,
    # A record of the command would hold the invite, and others the names of people and machines.
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


def chosen() -> OpenSink:
    """Return the sink's opener; raise `Usage` if W&B would have to ask for a key."""
    wandb.setup(wandb.Settings(silent=True))
    is_online = os.environ.get("WANDB_MODE", "online") in ("online", "shared", "run")
    if is_online and not wandb.login(verify=False, prompt=False):
        raise Usage(
            "--log wandb",
            "no key for Weights & Biases is on this machine",
            "run `wandb login`, or set WANDB_MODE=offline",
        )
    return WandbRun


class WandbRun:
    """The sink. A node that starts again continues its run, and the members of a run of Farflock
    are one group. The axis of all charts is the node's own step, which may be made again."""

    def __init__(self, origin: Origin) -> None:
        run, peer = origin.run[:_SHOWN], origin.peer[-_SHOWN:]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=origin.run,
            name=f"{run} {peer}",
            id=f"{origin.run[: 2 * _SHOWN]}-{origin.peer[-2 * _SHOWN :]}",
            resume="allow",
            dir=origin.folder,
            settings=wandb.Settings(host=peer, **_SETTINGS),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, measures: Measures) -> None:
        """Hand the numbers to W&B's own process, which keeps them on disk and sends them."""
        self._run.log({"step": measures.step, **numbers(measures)})

    def close(self) -> None:
        """Wait until W&B has sent everything."""
        self._run.finish()
