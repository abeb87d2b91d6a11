"""A peer trains on packed windows that it draws, and sees whichever text it has in one way."""

import itertools

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.data import sequences
from farflock.node.data.draws import BadDraws, Draws
from farflock.node.data.index import PIECE_BYTES, DataIndex, DataPage, DataShard, DataSource
from farflock.node.data.packing import document_lengths, packing_of
from farflock.node.data.sequences import PackedBatches, ShardedText, held_out_tokens, stream_of
from farflock.node.model.data import BadData, Batches, evaluation
from farflock.node.model.loss import IGNORED

END, MARK = 0, 2**31
SIZES = {"web": (300, 90, 20), "code": (150, 210)}
names = itertools.count()


class Library:
    """Shards in memory, and a record of what was opened."""

    def __init__(
        self, vocabulary=1000, mix=None, sizes=SIZES, held_out=(), missing=(), marks=False
    ):
        self.tokens, self.opened, self._marks = {}, [], marks
        self._dtype = np.dtype("<u2" if vocabulary <= 2**16 and not marks else "<u4")
        self._random, self._vocabulary = np.random.Generator(np.random.Philox(key=5)), vocabulary
        shards = {source: tuple(map(self._shard, each)) for source, each in sizes.items()}
        self.missing = {shards[source][place].sha256 for source, place in missing}
        page = DataPage(sha256="0" * 64, size=1, pieces=("0" * 64,), shards=1, tokens=1)
        kept = {source: tuple(map(self._shard, held_out)) for source in sizes}
        index = DataIndex(
            vocabulary=vocabulary,
            token_bytes=self._dtype.itemsize,
            end_of_text=END,
            answers=marks or msgspec.UNSET,
            sources={
                source: DataSource(documents=1, tokens=1, pages=(page,), held_out=kept[source])
                for source in sizes
            },
        )
        self.text = ShardedText(index, shards, mix, self._open)

    def _shard(self, count):
        """Documents of 1 to 40 tokens, each with its end but the last."""
        tokens = self._random.integers(1, self._vocabulary, count).astype(self._dtype)
        tokens[np.cumsum(self._random.integers(1, 40, count)).clip(max=count - 1)] = END
        tokens[-1] = 1
        if self._marks:  # on two of three tokens, and on ends of text that end nothing
            tokens[self._random.integers(0, 3, count).astype(bool) & (tokens != END)] |= MARK
            tokens[3] = END | MARK
        name = f"{next(names):064x}"
        self.tokens[name] = tokens
        size = count * self._dtype.itemsize
        pieces = ("0" * 64,) * -(-size // PIECE_BYTES)
        return DataShard(sha256=name, size=size, pieces=pieces, tokens=count, documents=count // 20)

    def _open(self, shard):
        if shard.sha256 in self.missing:
            raise BadData("it is not here; fetch it")
        self.opened.append(shard)
        return self.tokens[shard.sha256]


def stream(library, peer="alice", run_seed=1, batch_size=4, seq=15, recurring=0):
    return PackedBatches(library.text, run_seed, peer, batch_size, seq, recurring)


def by_hand(library, numbers, seq=15, peer="alice", run_seed=1):
    """The rows of these draws, each packed anew."""
    sizes = {source: [each.tokens for each in all_] for source, all_ in library.text.shards.items()}
    rows = []
    for number in numbers:
        drawn = Draws(sizes, seq + 1, run_seed, peer, library.text.mix).draw(number)
        tokens = library.tokens[library.text.shards[drawn.source][drawn.shard].sha256]
        packing = packing_of(document_lengths(tokens, END), seq + 1)
        rows.append(packing.window(drawn.window, tokens).astype(np.int64))
    return torch.from_numpy(np.stack(rows))


@pytest.mark.parametrize("vocabulary", [1000, 2**16, 262_144])
@given(step=st.integers(0, 2**40), batch_size=st.integers(1, 5), seq=st.integers(1, 40))
def test_a_batch_is_the_windows_of_its_draws(vocabulary, step, batch_size, seq):
    library = Library(vocabulary)
    x, y = stream(library, batch_size=batch_size, seq=seq).batch(step)
    assert x.dtype == y.dtype == torch.int64
    assert x.shape == y.shape == (batch_size, seq)
    rows = by_hand(library, range(step * batch_size, (step + 1) * batch_size), seq)
    assert torch.equal(x, rows[:, :-1])
    assert torch.equal(y, rows[:, 1:])


def test_tokens_of_four_bytes_keep_their_values():
    x, _ = stream(Library(262_144), batch_size=32).batch(0)
    assert int(x.max()) > 2**16


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=6))
def test_a_batch_does_not_depend_on_those_before(steps):
    library = Library(mix={"web": 3, "code": 1})
    one = stream(library)
    for step in steps:
        x, y = one.batch(step)
        again = stream(library).batch(step)
        assert torch.equal(x, again[0])
        assert torch.equal(y, again[1])


def test_seed_peer_and_step_each_change_the_batch():
    library = Library()
    base = stream(library, batch_size=16).batch(3)[0]
    others = [
        stream(library, batch_size=16, run_seed=2).batch(3)[0],
        stream(library, "bob", batch_size=16).batch(3)[0],
        stream(library, batch_size=16).batch(2)[0],
    ]
    assert not any(torch.equal(base, other) for other in others)


def test_an_epoch_has_all_windows_once():
    library = Library(sizes={"web": (320,)})
    one = stream(library, batch_size=5)
    rows = [tuple(row) for step in range(4) for row in one.batch(step)[0].tolist()]
    assert len(set(rows)) == 320 // 16 == 20
    assert {tuple(row) for step in range(4, 8) for row in one.batch(step)[0].tolist()} == set(rows)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 2**40))
def test_recurring_samples_are_the_first_draws_in_the_orders_of_batches(
    recurring, batch_size, step
):
    library = Library()
    one = stream(library, batch_size=batch_size, recurring=recurring)
    samples = one.samples(step)
    tokens = np.arange(1000, dtype=np.uint16)
    assert samples == Batches(tokens, 1, "alice", batch_size, 15, recurring=recurring).samples(step)
    assert torch.equal(one.batch(step)[0], by_hand(library, samples)[:, :-1])


@given(st.integers(0, 200), st.integers(0, 60), st.sampled_from([0, 1, 7, 40]), st.integers(1, 5))
def test_needed_shards_are_those_that_batches_open(step, steps, recurring, batch_size):
    library = Library()
    one = stream(library, batch_size=batch_size, recurring=recurring)
    needed = one.needed(step, steps)
    assert not library.opened
    for each in range(step, step + steps):
        one.batch(each)
    # an opened shard may have been forgotten, and opened again
    assert list(dict.fromkeys(library.opened)) == needed


def test_needed_shards_of_an_endless_run_are_found_at_once():
    library = Library()
    everything = [shard for shards in library.text.shards.values() for shard in shards]
    assert len(stream(library).needed(7, 10**12)) == len(everything)
    assert len(stream(library, recurring=2**20).needed(7, 10**12)) == len(everything)


def test_shards_are_opened_and_packed_once_while_they_are_used():
    library = Library(mix={"web": 1, "code": 1})
    one = stream(library, batch_size=8)
    for step in range(30):
        one.batch(step)
    turns = len(library.opened)
    assert turns < 60, "240 sequences, of a few shards at a time"
    one.batch(29)
    assert len(library.opened) == turns


def test_the_shards_of_recurring_samples_stay_packed():
    library = Library(sizes={"web": (64,) * 20})
    one = stream(library, batch_size=10, recurring=80)
    for step in range(40):
        one.batch(step)
    assert len(library.opened) == 20


def test_the_mixture_is_that_of_the_text():
    only = Library(mix={"code": 1})
    assert {shard.sha256 for shard in stream(only).needed(0, 100)} == {
        shard.sha256 for shard in only.text.shards["code"]
    }


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"batch_size": 0}, BadData, "use 1 or more of each"),
        ({"seq": 0}, BadData, "use 1 or more of each"),
        ({"recurring": -1}, BadData, "number of recurring samples"),
        ({"recurring": 2**20 + 1}, BadData, "number of recurring samples"),
        ({"seq": 210}, BadDraws, "no shard of code has 211 tokens"),
    ],
)
def test_impossible_batches_are_refused(change, error, sentence):
    with pytest.raises(error, match=sentence):
        stream(Library(), **change)


@pytest.mark.parametrize("step", [-1, 2**63])
@pytest.mark.parametrize("recurring", [0, 5])
def test_a_step_out_of_range_is_refused(step, recurring):
    with pytest.raises(BadData, match="out of range"):
        stream(Library(), recurring=recurring).batch(step)


def test_a_shard_that_is_not_here_is_refused_when_it_is_drawn_from():
    library = Library(missing=[("code", 0)])
    one = stream(library)
    with pytest.raises(BadData, match="fetch it"):
        for step in range(50):
            one.batch(step)
    library.missing.clear()
    one.batch(0)


def test_a_shard_of_another_size_is_refused():
    library = Library()
    library.tokens = {name: tokens[:-1] for name, tokens in library.tokens.items()}
    with pytest.raises(BadData, match=r"has \d+ tokens, and its index says \d+; delete it"):
        stream(library).batch(0)


def test_tokens_outside_the_vocabulary_are_refused():
    library = Library()
    for tokens in library.tokens.values():
        tokens[7] = 1000
    with pytest.raises(BadData, match="has token 1000, and the index's vocabulary ends at 999"):
        stream(library).batch(0)


def test_a_stream_is_made_for_either_text():
    library, tokens = Library(), np.arange(1000, dtype=np.uint16)
    terms = 1, "alice", 4, 15
    packed, plain = stream_of(library.text, *terms), stream_of(tokens, *terms, recurring=9)
    assert isinstance(packed, PackedBatches)
    assert torch.equal(packed.batch(2)[0], stream(library).batch(2)[0])
    assert isinstance(plain, Batches)
    assert torch.equal(plain.batch(2)[0], Batches(tokens, *terms, recurring=9).batch(2)[0])
    for each in (packed, plain):
        assert (each.batch_size, each.seq) == (4, 15)
    assert (packed.recurring, plain.recurring) == (0, 9)


@pytest.mark.parametrize("vocabulary", [1000, 262_144])
@pytest.mark.parametrize("sizes", [(), (30,), (30, 7)])
def test_held_out_text_is_that_of_all_sources_in_order(vocabulary, sizes):
    library = Library(vocabulary, held_out=sizes)
    expected = [
        token
        for source in library.text.index.sources.values()
        for shard in source.held_out
        for token in library.tokens[shard.sha256].tolist()
    ]
    tokens = held_out_tokens(library.text)
    assert tokens.tolist() == expected
    assert len(expected) == 2 * sum(sizes)
    assert tokens.dtype == library.text.index.dtype


@pytest.mark.parametrize("vocabulary", [1000, 2**31])
@given(step=st.integers(0, 2**40))
def test_a_mark_leaves_a_token_out_as_a_target_alone(vocabulary, step):
    library = Library(vocabulary, marks=True)
    x, y = stream(library).batch(step)
    rows = by_hand(library, range(4 * step, 4 * step + 4))  # with their marks
    assert torch.equal(x, rows[:, :-1] % MARK)
    expected = rows[:, 1:].clone()
    expected[expected >= MARK] = IGNORED
    assert torch.equal(y, expected)
    assert 0 < int((y == IGNORED).sum()) < y.numel()


def test_marks_change_neither_the_windows_nor_their_order():
    marked, plain = Library(marks=True), Library(70_000)
    for name, tokens in zip(plain.tokens, marked.tokens.values(), strict=True):
        bare = tokens % MARK
        bare[(bare == END) & (tokens != END)] = 1  # an end with a mark ends no document
        plain.tokens[name] = bare
    for step in range(20):
        ours = stream(marked).batch(step)[0]
        assert torch.equal(ours.clamp(min=1), stream(plain).batch(step)[0].clamp(min=1))


def test_a_marked_token_outside_the_vocabulary_is_refused():
    library = Library(marks=True)
    for tokens in library.tokens.values():
        tokens[7] = 1000 | MARK
    with pytest.raises(BadData, match="has token 1000, and the index's vocabulary ends at 999"):
        stream(library).batch(0)


@pytest.mark.parametrize("sizes", [(), (30,), (30, 7)])
@pytest.mark.parametrize("sources", [SIZES, {"web": (300,)}])
def test_held_out_windows_have_no_targets_with_a_mark(sizes, sources):
    library = Library(marks=True, held_out=sizes, sizes=sources)
    tokens = held_out_tokens(library.text)
    whole = [
        library.tokens[shard.sha256]
        for source in library.text.index.sources.values()
        for shard in source.held_out
    ]
    assert tokens.dtype == "<i4"
    assert (tokens.view("<u4")).tolist() == [token for each in whole for token in each.tolist()]
    if not sizes:
        return
    x, y = evaluation(tokens, 9, 100)
    assert int(x.min()) >= 0
    assert int(x.max()) < 1000
    assert set(y[y < 0].tolist()) == {IGNORED}


def test_one_held_out_shard_stays_where_it_is():
    library = Library(sizes={"web": (300,)}, held_out=(40,))
    (shard,) = library.text.index.sources["web"].held_out
    assert held_out_tokens(library.text) is library.tokens[shard.sha256]


def test_too_much_held_out_text_is_refused_before_it_is_opened(monkeypatch):
    monkeypatch.setattr(sequences, "MAX_HELD_OUT_TOKENS", 100)
    library = Library(held_out=(51,))
    with pytest.raises(BadData, match="102 tokens are held out, and at most 100 can be evaluated"):
        held_out_tokens(library.text)
    assert not library.opened


def test_an_index_with_sources_keeps_their_order_when_it_is_read():
    """The order of sources decides equal remainders of a mixture."""
    library = Library()
    read = msgspec.json.decode(library.text.index.encode(), type=DataIndex)
    assert list(read.sources) == list(SIZES)
