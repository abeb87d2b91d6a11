"""Whole simulated runs: real steps of a tiny model, a lossy network, peers that die and return."""

import collections
import functools
import itertools
import struct

import pytest
import torch

from farflock.node.data.samples import text_in_memory
from farflock.node.errors import Usage
from farflock.node.model.corpus import load_corpus
from farflock.node.model.data import Batches, evaluation
from farflock.node.model.llama import PRESETS
from farflock.node.run.terms import RunPlan
from farflock.node.simulate.simulation import SimulationResult, World, held_out, simulate
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.sim.network import LinkModel

TOKENS = 12_000
BATCH, PERIOD = 2, 4


@pytest.fixture(scope="module")
def text():
    torch.set_num_threads(1)
    return text_in_memory(ByteTokenizer().encode(load_corpus("shakespeare").train[:200_000]))


def simulated(
    text,
    method: str,
    *,
    peers=3,
    seed=1,
    loss=0.0,
    churn_s=None,
    codec="fp16",
    progress=lambda share: None,
    folder=None,
    total=TOKENS,
    **more,
) -> SimulationResult:
    world = World(peers, total, LinkModel(loss=loss), churn_s=churn_s, view_s=3.0, **more)
    return simulate(plan_of(method, seed, codec, total), world, text, progress, folder)


@pytest.fixture(scope="module")
def plain(text):
    """Results of undisturbed runs of three peers, each run once."""
    return functools.cache(lambda method, codec="fp16": simulated(text, method, codec=codec))


def plan_of(method: str, seed=1, codec="fp16", total=TOKENS) -> RunPlan:
    options = {"codec": codec, "deadline_s": 8.0} if method != "local" else {}
    options |= {"period": PERIOD} if method in ("noloco", "diloco") else {}
    inner, schedule = InnerConfig(lr=1e-2), Schedule(1e-2, total)
    return RunPlan(seed, PRESETS["tiny"], inner, schedule, method, options, batch=BATCH, seq=32)


def facts(outcome: SimulationResult):
    return (
        outcome.state_hash,
        outcome.rounds,
        outcome.losses,
        outcome.bytes,
        outcome.virtual_s,
        outcome.kills,
    )


@pytest.mark.long
@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_the_same_seed_gives_the_same_run_down_to_the_last_byte(text, method: str):
    once, again = (simulated(text, method, loss=0.2, churn_s=4.0, total=6_000) for _ in range(2))
    assert once.kills
    assert facts(once) == facts(again)


@pytest.mark.parametrize(
    "method",
    [
        "noloco",
        pytest.param("diloco", marks=pytest.mark.long),
        pytest.param("ddp", marks=pytest.mark.long),
        pytest.param("lean", marks=pytest.mark.long),
    ],
)
def test_a_run_that_was_interrupted_goes_on_bit_by_bit(text, tmp_path, method: str):
    whole = simulated(
        text,
        method,
        loss=0.1,
        churn_s=8.0,
        leg_tokens=2_500,
        total=6_000,
        folder=tmp_path / "whole",
    )

    def interrupt(share: float) -> None:
        if (tmp_path / "cut" / "leg-1" / "story.json").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulated(
            text,
            method,
            loss=0.1,
            churn_s=8.0,
            leg_tokens=2_500,
            total=6_000,
            folder=tmp_path / "cut",
            progress=interrupt,
        )
    assert not (tmp_path / "cut" / "leg-2").exists()
    again = simulated(
        text, method, loss=0.1, churn_s=8.0, leg_tokens=2_500, total=6_000, folder=tmp_path / "cut"
    )
    assert facts(again) == facts(whole)
    once_more = simulated(
        text, method, loss=0.1, churn_s=8.0, leg_tokens=2_500, total=6_000, folder=tmp_path / "cut"
    )
    assert facts(once_more) == facts(whole)


def test_a_peer_that_was_killed_or_saved_goes_on_where_its_samples_count(
    text, monkeypatch, tmp_path
):
    lives = collections.defaultdict(dict)  # by peer and life, the samples at which batches begin
    batch = Batches.batch

    def watched(self, step):
        _, _, stream, drawn = struct.unpack_from("<BB8sQ", self.cursor(step))
        lives[stream].setdefault(self, {})[drawn] = None
        return batch(self, step)

    monkeypatch.setattr(Batches, "batch", watched)
    outcome = simulated(
        text, "diloco", loss=0.1, churn_s=8.0, leg_tokens=6_000, total=12_000, folder=tmp_path
    )
    goes_on = []  # by change of life, where the next one begins, and how much comes again
    for each in lives.values():
        for before, after in itertools.pairwise(map(list, each.values())):
            assert after == list(range(after[0], after[-1] + 1, BATCH))
            goes_on.append((after[0], before[-1] + BATCH - after[0]))
    assert outcome.kills
    assert len(goes_on) == len(lives) + outcome.kills, "at the end of a leg, all stop"
    assert all(again >= 0 for _, again in goes_on), "none is passed over"
    assert sum(again == 0 for _, again in goes_on) >= len(lives), "all that are saved go on there"
    assert sum(again > 0 and first > 0 for first, again in goes_on) >= 2, "so do killed ones"


def test_a_leg_that_was_cut_short_is_not_believed(text, tmp_path):
    whole = simulated(text, "diloco", leg_tokens=2_500, total=6_000, folder=tmp_path)
    (tmp_path / "leg-3" / "story.json").unlink()
    (
        tmp_path
        / "leg-2"
        / "peer-1"
        / next(path.name for path in (tmp_path / "leg-2" / "peer-1").iterdir())
        / "method.safetensors"
    ).write_bytes(b"torn")
    assert facts(
        simulated(text, "diloco", leg_tokens=2_500, total=6_000, folder=tmp_path)
    ) == facts(whole)


def test_a_folder_of_another_run_is_refused(text, tmp_path):
    terms = {"peers": 1, "leg_tokens": 1_000, "total": 1_500, "folder": tmp_path}
    simulated(text, "local", **terms)
    with pytest.raises(Usage, match="belongs to another run"):
        simulated(text, "local", seed=2, **terms)


def test_another_seed_gives_another_run(text):
    one, other = (simulated(text, "noloco", seed=seed, total=1_000) for seed in (1, 2))
    assert one.state_hash != other.state_hash


@pytest.mark.parametrize("method", ["diloco", pytest.param("ddp", marks=pytest.mark.long)])
def test_all_members_of_an_exact_method_end_with_the_same_state(text, method: str):
    outcome = simulated(text, method, peers=4, loss=0.2, total=6_000)
    newest = max(int(state["round"]) for state in outcome.states.values())
    hashes = {
        state_hash(state) for state in outcome.states.values() if int(state["round"]) == newest
    }
    assert len(hashes) == 1


@pytest.mark.parametrize(
    "method",
    [
        "diloco",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("noloco", "ddp", "local")),
    ],
)
def test_the_loss_falls(plain, method: str):
    outcome = plain(method)
    assert outcome.losses[-1] < outcome.losses[0] - 0.5


def test_peers_that_are_killed_come_back_and_the_run_ends(text):
    outcome = simulated(text, "noloco", peers=4, churn_s=3.0, total=8_000)
    assert outcome.kills >= 1
    assert outcome.losses[-1] < outcome.losses[0]


@pytest.mark.long
def test_int8_loses_no_more_than_noise_against_fp16(plain):
    raw, small = plain("diloco"), plain("diloco", "int8")
    assert abs(raw.losses[-1] - small.losses[-1]) < 0.15
    assert small.bytes < raw.bytes


@pytest.mark.parametrize("method", ["diloco", pytest.param("noloco", marks=pytest.mark.long)])
def test_the_held_out_loss_is_the_mean_over_peers_of_what_they_would_export(
    text, plain, method: str
):
    outcome = plain(method)
    x, y = evaluation(text.sources[0].read(0), 32, 16)
    plan = plan_of(method)
    each = [held_out(plan, [state], x, y) for state in outcome.states.values()]
    together = held_out(plan, outcome.states.values(), x, y)
    assert together.mean == pytest.approx(sum(one.mean for one in each) / 3)
    assert 0 < together.standard_error < 0.5
    assert together.mean < outcome.losses[0] - 0.5
