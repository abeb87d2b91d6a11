"""A look at a run's manifest and data before it is joined."""

from farflock.node.assembly.known_run import read_run
from farflock.node.assembly.learnt import known_members
from farflock.node.process.data_look import Excerpt, read_excerpts
from farflock.node.process.network import MachineOptions
from farflock.node.process.run_data import RunData, fetch_data
from farflock.node.process.run_text import fetch_tokenizer
from farflock.node.process.visit import visiting_run
from farflock.node.run.data_section import tokenizer_of
from farflock.node.run.invite import Invite
from farflock.node.run.manifest import Manifest


async def fetch_plan(
    machine: MachineOptions, invite: Invite, timeout_s: float
) -> tuple[Manifest, RunData | None]:
    """Return the verified manifest of an invite's run, and what is known of its prepared data,
    whose index is fetched; raise `RefusedByRun` if no member has that."""
    async with visiting_run(invite, timeout_s) as visit:
        manifest, links = read_run(visit.learnt).manifest, visit.world.links
        members = known_members(links, visit.learnt.records, invite.run)
        data = await fetch_data(links, invite.run, manifest.data, members, machine)
        if data is not None:
            data.close()  # it is lent to nobody
        return manifest, data


async def look_at_data(
    machine: MachineOptions, invite: Invite, timeout_s: float, seed: int
) -> tuple[Manifest, RunData | None, list[Excerpt]]:
    """Return the same, and a few documents of the data, drawn by the seed."""
    async with visiting_run(invite, timeout_s) as visit:
        manifest, links, run = read_run(visit.learnt).manifest, visit.world.links, invite.run
        members = known_members(links, visit.learnt.records, run)
        data = await fetch_data(links, run, manifest.data, members, machine)
        if data is None:
            return manifest, None, []
        data.close()
        await fetch_tokenizer(links, run, manifest.data, members)
        tokenizer = tokenizer_of(manifest.data)
        return manifest, data, await read_excerpts(links, run, data, members, tokenizer, seed)
