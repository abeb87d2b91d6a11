"""What a newcomer receives and computes to believe a chain of 100,000 views; `-s` prints it."""

import time

import pytest
from adversaries import long_chain

from farflock.swarm.frame import Frame, pack
from farflock.swarm.protocol.arrival import FirstViews

MOST_BYTES, MOST_S = 2_000_000, 5.0


def shown_to_a_newcomer(voters, length, everybody):
    """Return the bytes of all messages and the seconds of a newcomer that has seen none before."""
    chain = long_chain.grown(voters, length, everybody=everybody)
    said = long_chain.shown(chain)
    arrival, begun_s = FirstViews(long_chain.RUN, long_chain.FOUNDER), time.process_time()
    for message in said:
        arrival.take(chain.newest.peers[0], message, 0.0)
    taken_s = time.process_time() - begun_s
    line = arrival.choice(1e9).line
    assert line.newest == chain.newest
    size = sum(len(pack(Frame(1, message))) for message in said)
    links = sum(len(message.links) for message in said)
    signed = "all" if everybody else "a quorum"
    print(  # noqa: T201 - the numbers of decision 038
        f"\n{voters} voters, {length:,} views signed by {signed}: {links} links, "
        f"{size:,} bytes, {taken_s:.1f} s"
    )
    return size, taken_s


@pytest.mark.parametrize("voters", [4, 16, 64])
def test_a_newcomer_believes_a_chain_whose_first_views_nobody_keeps(voters):
    size, _ = shown_to_a_newcomer(voters, 1500, everybody=False)
    assert size < MOST_BYTES


@pytest.mark.long
@pytest.mark.parametrize("everybody", [False, True], ids=["a quorum signs", "all sign"])
@pytest.mark.parametrize("voters", [4, 16, 64])
def test_a_chain_of_100_000_views_takes_two_megabytes_and_five_seconds(voters, everybody):
    size, taken_s = shown_to_a_newcomer(voters, 100_000, everybody)
    assert size < MOST_BYTES
    assert taken_s < MOST_S
