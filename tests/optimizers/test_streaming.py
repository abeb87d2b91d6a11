"""Streaming DiLoCo: which parameters make a fragment, when it is sent, and what the constructor
refuses."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.optimizers.method import ExchangeKey, Progress, Result
from farflock.optimizers.parts.outer import OuterSGD
from farflock.optimizers.parts.state import WrongState, state_hash
from farflock.optimizers.streaming import Streaming, split

EXACT = {"codec": "fp32", "return_codec": "fp32"}
LLAMA = {
    "model.embed_tokens.weight": (50, 4),
    **{
        f"model.layers.{layer}.{part}.weight": (4, 4)
        for layer in range(6)
        for part in ("self_attn.q_proj", "mlp.up_proj")
    },
    "model.norm.weight": (4,),
    "lm_head.weight": (50, 4),
}


def layers_of(names):
    return sorted({int(name.split(".")[2]) for name in names if ".layers." in name})


# fragments


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [("strided", [[0, 3], [1, 4], [2, 5]]), ("sequential", [[0, 1], [2, 3], [4, 5]])],
)
def test_whole_layers_of_a_llama_go_to_a_fragment_strided_or_in_sequence(pattern, layers):
    assert [layers_of(names) for names in split(LLAMA, 3, pattern)] == layers


def test_what_is_in_no_layer_goes_to_the_fragment_that_is_smallest_so_far():
    """Layers have 32 values; the embedding (200) goes to 0, the norm to 1, the head (200) to 2."""
    first, second, third = split(LLAMA, 3)
    assert "model.embed_tokens.weight" in first
    assert "model.norm.weight" in second
    assert "lm_head.weight" in third


def test_layer_counts_that_fragments_do_not_divide_are_spread():
    assert [layers_of(names) for names in split(LLAMA, 4)] == [[0, 4], [1, 5], [2], [3]]
    assert [layers_of(names) for names in split(LLAMA, 4, "sequential")] == [
        [0, 1],
        [2],
        [3, 4],
        [5],
    ]


def test_two_stacks_of_layers_do_not_share_their_numbers():
    shapes = {
        f"{side}.layers.{layer}.weight": (2,)
        for side in ("encoder", "decoder")
        for layer in range(2)
    }
    assert split(shapes, 4) == tuple((name,) for name in shapes)


def test_modules_stay_whole_where_nothing_is_numbered():
    shapes = {"up.weight": (3, 2), "up.bias": (3,), "down.weight": (2, 3), "scale": (1,)}
    assert split(shapes, 2) == (("up.weight", "up.bias"), ("down.weight", "scale"))


@given(
    layers=st.integers(0, 9),
    outside=st.lists(st.sampled_from(["embed", "norm", "head.a", "head.b"]), unique=True),
    fragments=st.integers(1, 13),
    pattern=st.sampled_from(["strided", "sequential"]),
)
def test_fragments_are_disjoint_full_and_together_the_model(layers, outside, fragments, pattern):
    shapes = {f"h.{layer}.w{part}": (3, layer + 1) for layer in range(layers) for part in range(2)}
    shapes |= {f"{name}.weight": (7,) for name in outside}
    if fragments > layers + len(outside):
        with pytest.raises(ValueError, match=f"this model has {layers + len(outside)}; choose"):
            split(shapes, fragments, pattern)
        return
    parts = split(shapes, fragments, pattern)
    assert len(parts) == fragments
    assert all(parts)
    assert sorted(itertools.chain(*parts)) == sorted(shapes)
    places = {name: p for p, names in enumerate(parts) for name in names}
    assert all(places[f"h.{layer}.w0"] == places[f"h.{layer}.w1"] for layer in range(layers))


def test_more_fragments_than_layers_are_refused_when_the_model_is_there(vectors):
    made = Streaming(period=10, fragments=3, **EXACT)
    with pytest.raises(
        ValueError, match="3 fragments need as many layers, and this model has 2; choose 2 or fewer"
    ):
        made.streams(vectors(a=torch.zeros(2), b=torch.zeros(3)))


# when


def alone(made, replica, steps, answer=lambda exchange, step: 0):
    """Run one peer whose exchanges are answered `answer(exchange, step)` steps late, or never if
    that is None; return what it asked for at which step."""
    asked, pending = [], []
    for step in range(1, steps + 1):
        replica.add_gradient(**{name: torch.ones(shape) for name, shape in replica.shapes.items()})
        made.local_step(replica, Progress(step - 1))
        for exchange in made.due(replica, Progress(step)):
            asked.append((step, exchange.key.stream, exchange.key.round))
            late = answer(exchange, step)
            if late is not None:
                pending.append((step + exchange.apply_after + late, step, exchange))
        for due, since, exchange in [entry for entry in pending if entry[0] <= step]:
            pending.remove((due, since, exchange))
            made.apply(replica, exchange, taken_alone(exchange, step - since))
    return asked


def taken_alone(exchange, steps_since=0):
    everything = {name: [(0, x.numel())] for name, x in exchange.tensors.items()}
    number, sent = exchange.key.round + exchange.stride, exchange.tensors
    return Result(
        "alone", number, ("me",), (1.0,), sent, None, sent, everything, steps_since=steps_since
    )


def layered(vectors, layers):
    replica = vectors(**{f"h{layer}": torch.zeros(layer + 1) for layer in range(layers)})
    replica.tensors["param"] = {
        f"h.{name[1:]}.w": x for name, x in replica.tensors["param"].items()
    }
    return replica


@pytest.mark.parametrize(
    ("options", "slack"),
    [
        ({"overlap": 1}, 2),  # of 3 steps until the next fragment is sent
        ({"overlap": 3}, 0),
        ({"overlap": 0}, 0),  # waits for each fragment
        ({"overlap": 1, "slack": 1}, 1),
        ({"overlap": 0, "slack": 3}, 3),
    ],
)
def test_a_late_fragment_is_waited_for_when_the_next_one_is_sent(vectors, options, slack):
    made = Streaming(12, 4, **options, **EXACT)
    assert {each.slack for each in made.streams(layered(vectors, 4))} == {slack}


@pytest.mark.parametrize(("period", "fragments"), [(12, 4), (10, 3), (7, 7), (5, 1), (100, 8)])
def test_fragments_take_turns_at_even_distances_each_once_a_period(vectors, period, fragments):
    made = Streaming(period, fragments, overlap=0, **EXACT)
    asked = alone(made, layered(vectors, fragments), 3 * period)
    expected = [
        ((n + 1) * period // fragments, f"fragment.{n % fragments}", n)
        for n in range(3 * fragments)
    ]
    assert asked == expected


def test_with_the_longest_overlap_one_is_merged_before_the_next_is_merged(vectors):
    made = Streaming(12, 4, overlap=3, **EXACT)
    flying = []
    replica = layered(vectors, 4)
    alone(
        made,
        replica,
        40,
        lambda exchange, step: flying.append(sum(one.book.pending for one in made._fragments)) or 0,
    )
    assert max(flying) == 2  # the one before is merged in the step in which this one is sent
    assert sum(one.book.pending for one in made._fragments) <= 1


def test_a_fragment_on_its_way_does_not_ask_again_and_the_others_go_on_at_their_pace(vectors):
    made = Streaming(12, 3, overlap=0, **EXACT)
    lost = ExchangeKey("fragment.1", 1)
    asked = alone(
        made, layered(vectors, 3), 50, lambda exchange, step: None if exchange.key == lost else 0
    )
    assert [step for step, stream, _ in asked if stream == "fragment.1"] == [8]
    assert [step for step, stream, _ in asked if stream == "fragment.0"] == [4, 16, 28, 40]
    assert [step for step, stream, _ in asked if stream == "fragment.2"] == [12, 24, 36, 48]


def test_after_a_late_answer_no_fragment_is_sent_twice_in_a_period_nor_in_a_burst(vectors):
    made = Streaming(12, 3, overlap=0, **EXACT)
    asked = alone(
        made, layered(vectors, 3), 200, lambda exchange, step: 30 if exchange.key.round == 1 else 0
    )
    for p in range(3):
        mine = [step for step, stream, _ in asked if stream == f"fragment.{p}"]
        assert all(later - earlier >= 12 for earlier, later in itertools.pairwise(mine))
        assert [later - earlier for earlier, later in itertools.pairwise(mine)][-4:] == [12] * 4
    steps = [step for step, _, _ in asked]
    assert min(later - earlier for earlier, later in itertools.pairwise(steps)) >= 4


def test_of_idle_fragments_the_one_with_the_first_round_asks_whatever_was_before(vectors):
    """A replayed round puts fragment 0 behind the others: its turn comes after theirs."""
    made, replica = Streaming(6, 3, overlap=0, **EXACT), layered(vectors, 3)
    made.streams(replica)
    made.local_step(replica, Progress(0))
    one = made.streams(replica)[0]
    replay = Result(
        "ok", 3, ("other",), (1.0,), {name: torch.zeros_like(x) for name, x in one.tensors.items()}
    )
    made.apply(replica, type(one)(one.key, "mean", one.group, {}), replay)
    asked = alone(made, replica, 12)
    assert [number for _, _, number in asked][:3] == [1, 2, 3]


@pytest.mark.parametrize("step", range(1, 25))
def test_a_joiner_takes_its_turns_in_the_order_and_at_the_distances_of_the_others(vectors, step):
    veteran, replica = Streaming(12, 3, overlap=0, **EXACT), layered(vectors, 3)
    alone(veteran, replica, step)
    joiner, own = Streaming(12, 3, overlap=0, **EXACT), layered(vectors, 3)
    joiner.restore(own, veteran.snapshot(replica), "adopt")
    theirs, ours = alone(veteran, replica, 36), alone(joiner, own, 40)
    assert [entry[1:] for entry in ours][: len(theirs)] == [entry[1:] for entry in theirs]
    offset = ours[0][0] - theirs[0][0]
    assert 0 <= offset < 4
    assert all(mine[0] - other[0] == offset for mine, other in zip(ours, theirs, strict=False))


# state


def test_what_members_must_agree_on_is_the_fragments_own_part(vectors):
    made, replica = Streaming(4, 2, overlap=0, **EXACT), layered(vectors, 2)
    alone(made, replica, 3)
    assert made.agreed(replica, "fragment.1").keys() == {"phi.h.1.w", "momentum.h.1.w"}
    before = state_hash(made.agreed(replica, "fragment.1"))
    alone(made, replica, 3)  # fragment 0 moves too
    moved = made.agreed(replica, "fragment.0")
    assert not torch.equal(moved["phi.h.0.w"], torch.zeros(1))
    assert state_hash(made.agreed(replica, "fragment.1")) != before


def test_a_snapshot_with_a_round_of_another_fragment_is_refused(vectors):
    made, replica = Streaming(4, 2, **EXACT), layered(vectors, 2)
    state = made.snapshot(replica) | {"round.1": torch.tensor(4)}
    with pytest.raises(WrongState, match=r"round.1 must be one of every 2 rounds from 1 on, got 4"):
        made.restore(replica, state, "adopt")


def test_carrying_a_snapshot_keeps_local_work_on_top_of_every_fragment(vectors):
    made, replica = Streaming(9, 2, outer=OuterSGD(1.0), **EXACT), layered(vectors, 2)
    alone(made, replica, 1)
    state = {"phi.h.0.w": torch.full((1,), -7.0), "phi.h.1.w": torch.full((2,), 3.0)}
    state |= {f"momentum.h.{layer}.w": torch.zeros(layer + 1) for layer in range(2)}
    made.restore(replica, state | {"round.0": torch.tensor(6), "round.1": torch.tensor(5)}, "carry")
    assert replica.read(["h.0.w"], "param")["h.0.w"].tolist() == [-8.0]
    assert replica.read(["h.1.w"], "param")["h.1.w"].tolist() == [2.0, 2.0]
    assert [number for _, _, number in alone(made, replica, 9)][:2] == [5, 6]


def test_the_defaults_are_those_of_the_paper():
    made = Streaming()
    assert (made.period, made.overlap, made.mix, made.outer.lr, made.outer.momentum) == (
        100,
        1,
        0.5,
        0.4,
        0.9,
    )
    assert made.pattern == "strided"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 0}, "a period of 0 steps"),
        ({"deadline_s": 0.0}, "a deadline of 0.0 s"),
        ({"fragments": 0}, "0 fragments do not fit into a period of 100 steps.*choose 1 to 100"),
        (
            {"period": 3, "fragments": 4},
            "4 fragments do not fit into a period of 3 steps.*choose 1 to 3",
        ),
        (
            {"period": 12, "fragments": 4, "overlap": 4},
            "an overlap of 4 steps: with 4 fragments in 12.*choose 0 to 3",
        ),
        ({"period": 10, "fragments": 4, "overlap": 3}, "choose 0 to 2"),
        ({"period": 10, "fragments": 1, "overlap": 10}, "choose 0 to 9"),
        ({"overlap": -1}, "an overlap of -1 steps"),
        ({"period": 12, "overlap": 1, "slack": 3}, "a slack of 3 steps .*choose 0 to 2, or none"),
        ({"slack": -1}, "a slack of -1 steps"),
        ({"mix": 1.5}, r"a mix of 1.5 .* choose one in \[0, 1\]"),
        ({"pattern": "random"}, "pattern 'random' is not known; choose strided or sequential"),
        ({"codec": "topk:64/4096"}, "codec topk:64/4096 is biased.*give it feedback"),
        ({"return_codec": "topk:64/4096", "feedback": 0.9}, "return codec topk:64/4096 is biased"),
        ({"feedback": 1.5}, "feedback of 1.5 is out of range"),
        ({"codec": "int9"}, "codec 'int9' is not known"),
    ],
)
def test_options_that_cannot_train_are_refused_with_the_nearest_that_can(options, message):
    with pytest.raises(ValueError, match=message):
        Streaming(**options)
