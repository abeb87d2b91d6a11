"""Whole runs by command; and planted bugs: mistakes that real systems of this kind have made,
which the watch must find."""

import json
import logging
from dataclasses import replace

import pytest
from worlds.decisions import one_is_a_quorum

from farflock.node.cli import main as cli
from farflock.node.train import exchange_client
from farflock.optimizers.diloco import DiLoCo
from farflock.swarm import chunks
from farflock.swarm.peer.rounds import rounds
from farflock.swarm.protocol import groups, pair, views
from farflock.swarm.protocol.exchange import mean


def first_acknowledgement(patch):
    """Make a peer take one acceptance for a decision, and a leader apply before its follower
    confirms."""
    one_is_a_quorum(patch)
    patch.setattr(pair.Pair, "_confirmed", lambda self: True)


def no_hash_check(patch):
    """A chunk is believed to be what it is called."""
    patch.setattr(chunks, "is_intact", lambda data, digest: True)


def round_key_again(patch):
    """After a round in which a peer was missing, the others use its key once more."""
    decode = exchange_client.ExchangeClient.decode

    def again(self, key, outcome, payloads=()):
        made = decode(self, key, outcome, payloads)
        return (
            replace(made, next_round=outcome.key.round)
            if made.status == "partial" and payloads
            else made
        )

    patch.setattr(exchange_client.ExchangeClient, "decode", again)


def dead_reducer_ignored(patch):
    """No member takes over the shards of a reducer that died."""

    def only_first(self, shard, now_s):
        return groups.reducers(self._roster.ordered, shard)[0] == self._roster.me

    patch.setattr(mean.Mean, "_is_mine", only_first)


def stale_view_accepted(patch):
    """Each member uses the view that it happens to know for whatever round,
    and takes messages of any view it has seen."""
    patch.setattr(
        rounds.OpenRounds,
        "view_of",
        lambda self, state, message: self._context.views.by_hash(message.view),
    )
    patch.setattr(views.Chain, "at", lambda self, number: self.newest)
    patch.setattr(views.Chain, "blocked", lambda self, number: False)


def feedback_settled_at_encode(patch):
    """The residual is computed when a message is made, whether or not it is taken."""
    due, take = DiLoCo.due, DiLoCo._take

    def settled(self, replica, progress):
        exchanges = due(self, replica, progress)
        for exchange in exchanges if self.feedback is not None else ():
            for name, message in exchange.tensors.items():
                kept = message.abs() < message.abs().max()
                self._memory.residual[name] = message * kept
        return exchanges

    def unsettled(self, replica, exchange, result):
        residual = dict(self._memory.residual)
        take(self, replica, exchange, result)
        self._memory.residual = residual

    patch.setattr(DiLoCo, "due", settled)
    patch.setattr(DiLoCo, "_take", unsettled)


PLANTED = {
    bug.__name__: bug
    for bug in (
        first_acknowledgement,
        no_hash_check,
        round_key_again,
        dead_reducer_ignored,
        stale_view_accepted,
        feedback_settled_at_encode,
    )
}


@pytest.fixture(params=sorted(PLANTED))
def planted_bug(request, monkeypatch):
    """One planted bug after the other."""
    PLANTED[request.param](monkeypatch)
    return request.param


@pytest.fixture
def quiet_log():
    """No messages of calls that fail because a test killed a peer; the level is set back by
    `own_log_level`."""
    logging.getLogger("farflock").setLevel(logging.CRITICAL)


@pytest.fixture
def simulated(capfd, monkeypatch, tmp_path):
    """A function that runs `farflock sim ARGUMENTS --json` and returns what it printed;
    the user's data are elsewhere."""
    monkeypatch.setenv("FARFLOCK_HOME", str(tmp_path))

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(["sim", *map(str, arguments), "--json"])
        out, err = capfd.readouterr()
        assert ended.value.code == 0, err
        return json.loads(out.splitlines()[-1])

    return run
