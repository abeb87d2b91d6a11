"""A worker of the faults benchmark: a program that trains with `SwarmOptimizer`, in a node's place.

`python -m farflock.experiments.bench.workers.hosted_program run FILE --folder FOLDER --host HOST`,
or `join INVITE …`. It takes the times of rounds from the file, waits before each step for as long
as a node does (node/process/brake.py), and leaves a node's files of its rounds and state.
"""

import argparse
import itertools
import os
import time
import tomllib
from pathlib import Path

import msgspec
import torch

import farflock
from farflock.experiments.measure.parent import end_with_parent
from farflock.node.library.run_options import SwarmOptions
from farflock.node.process.brake import BRAKE
from farflock.node.state.paths import write_whole

FEATURES, BATCH, LEARNING_RATE, CHECKPOINT_S = 64, 8, 1e-2, 5.0


def founded(file: Path) -> SwarmOptions:
    """Return the options of a run whose rounds come as those of a manifest do."""
    manifest = tomllib.loads(file.read_text())
    rounds, method = manifest["exchange"], manifest["method"]
    return SwarmOptions(
        view_s=rounds["view_s"],
        deadline_s=rounds["deadline_s"],
        round_s=method["options"]["round_s"],
    )


def write(optimizer: farflock.SwarmOptimizer, folder: Path) -> None:
    """Put down what a node puts down of itself."""
    said = {"peer": optimizer.peer, "invite": optimizer.invite, "step": optimizer.run_steps()}
    write_whole(folder / "status.json", msgspec.json.encode(said))


def receipt(optimizer: farflock.SwarmOptimizer) -> bytes:
    """Return the line of the last round. A program is told how many took part in it: all members,
    or, as far as is known, this one only."""
    last = optimizer.last_round
    assert last is not None
    is_whole = last.peers == len(optimizer.members)
    who = optimizer.members if is_whole else (optimizer.peer,)
    return msgspec.json.encode({"round": last.number, "participants": who}) + b"\n"


def train(optimizer: farflock.SwarmOptimizer, model: torch.nn.Module, folder: Path) -> None:
    """Train for ever, and tell of each round that counted."""
    brake, told = Path(os.environ[BRAKE]), None
    with (folder / "receipts.jsonl").open("ab", buffering=0) as receipts:
        for step in itertools.count():
            time.sleep(float(brake.read_text()))
            x = torch.randn(BATCH, FEATURES)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step == 0:
                write(optimizer, folder)
            last = optimizer.last_round
            if last is not told and last is not None and last.status != "failed":
                receipts.write(receipt(optimizer))
            told = last


def main(verb: str, what: str, folder: Path, host: str) -> None:
    """Found the run of a file, or join by an invite, and train."""
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    model = torch.nn.Linear(FEATURES, 1)
    founds = verb == "run"
    options = founded(Path(what)) if founds else SwarmOptions()
    options |= SwarmOptions(folder=folder, host=host, checkpoint_s=CHECKPOINT_S)
    invite, method = (None, "diloco") if founds else (what, None)
    with farflock.SwarmOptimizer(model, method, invite, lr=LEARNING_RATE, **options) as optimizer:
        train(optimizer, model, folder)


if __name__ == "__main__":
    end_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["run", "join"])
    parser.add_argument("what")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--host")
    main(**vars(parser.parse_args()))
