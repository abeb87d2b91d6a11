"""A process' part in the evaluation of its run: the held-out text, and what follows when the guard
ends the run.

A run that its guard has ended is over for all members. At each of them the checkpoints from after
the last good round are set aside, so that whatever takes the newest checkpoint takes a good one;
none is deleted. The founder, without whom the run does not begin again, is told so if it starts the
run once more: the same steps would mostly go the same way. It can go on from the good checkpoint by
moving away what was set aside; the others then join it as they join any run.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from farflock.node.assembly.checkpoints import CheckpointManager, folder_of, last_good
from farflock.node.assembly.node import ReplicaNode
from farflock.node.assembly.text import held_out_here
from farflock.node.data.sequences import PackedBatches, ShardedText, Text
from farflock.node.errors import Failure, explained
from farflock.node.model.data import BadData, Batches
from farflock.node.pipeline.node import PipelineNode
from farflock.node.process.data_supply import DataSupply
from farflock.node.run.manifest import Manifest
from farflock.node.state import checkpoint
from farflock.node.state.checkpoint import CheckpointError
from farflock.node.state.paths import RunFolder
from farflock.node.tokens.tokenizer import TokenIds

START_TIMEOUT_S = 30.0  # for a founder's held-out text, before it trains without a measurement
AGAIN_S = 60.0  # before what is missing is looked for again
GONE_WRONG = "gone-wrong"  # the reason for which checkpoints are set aside

log = logging.getLogger(__name__)


async def bring_held_out(
    part: ReplicaNode | PipelineNode, manifest: Manifest, supply: DataSupply | None
) -> None:
    """Fetch the held-out text in the background, and let the node evaluate on it. As long as it is
    not here, a drawn node says that it cannot."""
    if part.evaluator is None:
        return
    measuring = part.evaluator.measuring
    while True:
        try:
            held_out = await _held_out(part, manifest, supply)
            part.evaluates_on(held_out, manifest.plan())
            return
        except BadData as error:  # as no later try will change
            measuring.unable = str(error)
            return
        except Exception as error:
            known = explained(error)
            if known is None:
                raise
            measuring.unable = str(known)
        await asyncio.sleep(AGAIN_S)


async def measure_start(part: ReplicaNode | PipelineNode, bringing: "asyncio.Task[None]") -> None:
    """Measure the weights with which a founder begins, before it trains them; `bringing` fetches
    the text. A pipeline has not all its stages then, and is not measured."""
    if not isinstance(part, ReplicaNode) or part.evaluator is None or part.step or part.tokens:
        return
    await asyncio.wait([bringing], timeout=START_TIMEOUT_S)
    await part.evaluator.at_start()


def facts_of(part: ReplicaNode | PipelineNode) -> dict[str, object]:
    """Return what a checkpoint says of the run beside its state: the members, and the newest
    evaluation."""
    chain = part.peer.context.chain
    members = [] if chain is None else list(chain.newest.peers)
    evaluated = {} if part.evaluator is None else part.evaluator.facts()
    return {"members": members, **evaluated}


async def _held_out(
    part: ReplicaNode | PipelineNode, manifest: Manifest, supply: DataSupply | None
) -> TokenIds:
    text = _text_of(part)
    if isinstance(text, ShardedText) and supply is not None:
        for source in text.index.sources.values():
            for shard in source.held_out:
                await supply.bring(shard)
    return await asyncio.to_thread(partial(held_out_here, manifest.data, text))


def _text_of(part: ReplicaNode | PipelineNode) -> Text:
    if isinstance(part, PipelineNode):
        assert part.text is not None, "a process knows what its run trains on"
        return part.text
    batches = part.training_task.batches
    if isinstance(batches, PackedBatches):
        return batches.text
    assert isinstance(batches, Batches), "there are no other batches"
    return batches.tokens


def has_gone_wrong(part: ReplicaNode | PipelineNode) -> bool:
    """Return whether the guard ended the run."""
    evaluator = part.evaluator if isinstance(part, ReplicaNode) else None
    return evaluator is not None and evaluator.ended_by is not None


def require_well(part: ReplicaNode | PipelineNode, keepers: Sequence[CheckpointManager]) -> None:
    """Raise `Failure` if the guard ended the run, after the checkpoints from after its last good
    round have been set aside."""
    if isinstance(part, ReplicaNode) and part.evaluator is not None:
        alarm = part.evaluator.ended_by
        if alarm is not None:
            aside = [leave_out(keeper.folder, alarm.good) for keeper in keepers]
            failure = gone_wrong(part, keepers, alarm.reason)
            raise Failure(failure.what, failure.why, failure.remedy + _and_aside(*aside))


def leave_out(folder: RunFolder, good_round: int | None) -> list[Path]:
    """Set aside the checkpoints of a whole model that are newer than the last good one, and return
    them."""
    good, found = last_good(folder.checkpoints, good_round), []
    paths = [path for _, path in checkpoint.steps(folder.checkpoints)]
    for path in paths[0 if good is None else paths.index(good) + 1 :]:
        try:
            found.append(checkpoint.put_aside(path, GONE_WRONG))
        except OSError as error:
            log.warning("%s is from after the trouble, and stays (%s)", path, error.strerror)
    return found


def require_unended(folder: RunFolder, run: str) -> None:
    """Raise `Failure` if the guard has ended this run at this node: a founder does not begin it
    again, unless the checkpoints that were set aside are moved away."""
    _finish_leaving_out(folder, run)
    every = checkpoint.steps_aside(folder.checkpoints, GONE_WRONG)
    aside = [path for path in every if _about(path).get("run") == run]
    if not aside:
        return
    good = [path for _, path in checkpoint.steps(folder.checkpoints)][-1:]
    begin = f"export {good[0]} and begin a run from it" if good else "begin another run"
    again = f"to go on from {good[0].name}" if good else "to begin this one again"
    raise Failure(
        "the guard has ended this run",
        str(_ended_by(aside[-1]).get("reason", "the training had gone wrong")),
        f"{begin}, with a lower learning rate, or, {again} with the same settings, move"
        f" {_listed(aside)} to another folder",
    )


def _finish_leaving_out(folder: RunFolder, run: str) -> None:
    """Set aside what a process that was killed at the end of the run has left."""
    for _, path in checkpoint.steps(folder.checkpoints)[-1:]:
        ended = _ended_by(path)
        if ended and _about(path).get("run") == run:
            good = ended.get("good")
            leave_out(folder, good if isinstance(good, int) else None)


def _about(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says of itself; nothing if it cannot be read."""
    try:
        return checkpoint.meta_of(path)
    except CheckpointError:
        return {}


def _ended_by(path: Path) -> dict[str, Any]:
    ended = _about(path).get("ended_by")
    return ended if isinstance(ended, dict) else {}


def _and_aside(*aside: list[Path]) -> str:
    every = [path for each in aside for path in each]
    return f"; {_listed(every)} came later, and nothing resumes from there" if every else ""


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(str(path) for path in paths)


def gone_wrong(
    part: ReplicaNode | PipelineNode, keepers: Sequence[CheckpointManager], reason: str
) -> Failure:
    """Return the error that ends a run whose training has gone wrong, with the last checkpoint from
    before."""
    good = None
    if isinstance(part, ReplicaNode) and part.evaluator is not None and keepers:
        good = last_good(folder_of(keepers[0].folder, keepers[0].role), part.evaluator.good)
    where = (
        f"the last good checkpoint here is {good}; export it, and begin a run from it"
        if good is not None
        else "no checkpoint here is from before that; begin again, or ask the other members for one"
    )
    return Failure("the training has gone wrong", reason, f"{where}, with a lower learning rate")
