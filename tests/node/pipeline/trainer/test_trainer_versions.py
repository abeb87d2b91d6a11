"""A trainer whose servers keep versions of their weights."""

from worlds.trainer_world import EPOCH, LIFE, STAGES, honest, saying, stages_of, trained

from farflock.node.pipeline.passes.requests import Backward, Done, Forward, Gone, Version, encode

NEW, OLD = Version(EPOCH + 2), Version(EPOCH, 7)


def versioned(request):
    """Answers of servers that keep versions: old weights forward, new ones if a pass names none."""
    body, *payloads = honest(request)
    if not isinstance(request, Forward | Backward):
        return (body,)
    version = OLD if isinstance(request, Forward) else request.version or NEW
    loss = 8.0 if isinstance(request, Backward) and request.stage == STAGES - 1 else None
    return encode(Done(LIFE, getattr(request, "attempt", 0), 0.1, loss, version=version)), *payloads


def with_versions(*scripts, **terms):
    """Run a test with servers that keep versions, of which some answer otherwise at first."""

    def decorate(main):
        @trained(**{"gone": "drop"} | terms)
        async def test(world):
            for peers in world.order.values():
                for peer in peers:
                    for kind in (Forward, Backward):
                        first = [step for who, what, step in scripts if (who, what) == (peer, kind)]
                        world.script(peer, kind, *first, *[versioned] * 20)
            await main(world)

        return test

    return decorate


@with_versions()
async def test_a_backward_pass_names_its_forward_pass_s_weights_also_when_it_is_asked_for_again(
    world,
):
    await world.merged()
    assert [entry.request.version for entry in world.asked(Backward)] == [None, OLD, OLD]
    world.gone += [(stage, f"{stage}a/{LIFE}") for stage in range(STAGES)]
    await world.until(lambda: len(world.asked(Backward)) == 6)
    again = {entry.request.stage: entry.request.version for entry in world.asked(Backward)[3:]}
    assert again == {2: NEW, 1: OLD, 0: OLD}, "the last stage's only pass has a version, too"


@with_versions(("1a", Backward, saying(Gone(EPOCH + 9, late=True))))
async def test_where_its_weights_may_be_used_no_more_the_rest_of_a_microbatch_is_dropped(world):
    await world.until(lambda: world.trainer.commits.dropped)
    assert [event for event in world.events if event[0] == "dropped"] == [("dropped", 0)] * 2
    assert stages_of(world.asked(Backward)) == [2, 1]
    await world.close(0, stages=(2,))
    assert ("microbatch", 0) not in world.events, "it does not count everywhere"
    assert (world.trainer.commits.finished, world.trainer.commits.dropped) == (0, 2)
    await world.until(lambda: stages_of(world.asked(Backward)) == [2, 1, 2, 1, 0])


@with_versions(("1a", Backward, saying(Gone(EPOCH + 9, late=True))), gone="newest")
async def test_or_it_is_differentiated_at_the_newest_weights(world):
    await world.merged()
    assert [entry.request.version for entry in world.asked(Backward, stage=1)] == [OLD, None]
    assert world.trainer.commits.dropped == 0


def test_a_server_without_the_weights_is_skipped_until_none_seems_to_have_them():
    lacking = saying(Gone(EPOCH + 1, late=False))
    some = [("1a", Backward, lacking), ("1b", Backward, lacking), ("1a", Backward, lacking)]

    @with_versions(*some)
    async def found(world):
        await world.merged()
        assert [entry.peer for entry in world.asked(Backward, stage=1)] == ["1a", "1b", "1a", "1b"]
        assert world.trainer.commits.dropped == 0

    @with_versions(*some, ("1b", Backward, lacking))
    async def not_found(world):
        await world.until(lambda: world.trainer.commits.dropped == 2)
        assert len(world.asked(Backward, stage=1)) == 4

    found(), not_found()


@trained()
async def test_a_message_in_an_outdated_version_is_dropped_at_the_stages_that_it_cannot_reach(
    world,
):
    """A codec's version, that is: no pass names weights."""
    world.script("1a", Backward, saying(Gone(EPOCH + 9, late=True)))
    await world.until(lambda: world.trainer.commits.dropped)
    assert world.trainer.commits.dropped == 2
    assert stages_of(world.asked(Backward)) == [2, 1]
    await world.close(0, stages=(2,))
    assert world.trainer.commits.finished == 0


@with_versions(
    *[("1a", Backward, saying(Gone(EPOCH - 1, late=False)))] * 4,
    *[("1b", Backward, saying(Gone(EPOCH - 1, late=False)))] * 4,
)
async def test_a_server_that_has_yet_to_reach_the_weights_is_asked_again(world):
    await world.merged()
    assert len(world.asked(Backward, stage=1)) == 9
    assert world.trainer.commits.dropped == 0


@with_versions()
async def test_what_a_round_names_and_leaves_out_is_over_and_does_not_count(world):
    await world.merged()
    world.left_out += [(1, (world.me, 0)), (1, ("u", 0))]
    await world.close(0)
    assert world.trainer.commits.dropped == 1
    assert world.trainer.commits.finished == 0
    assert ("microbatch", 0) not in world.events
    assert not world.left_out
