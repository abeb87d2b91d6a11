"""A node has the run's text and tokenizer before the run's members count it, or is refused."""

import asyncio
import os

import msgspec
import pytest

from farflock.node.errors import Failure, RefusedByRun
from farflock.node.process.run_text import fetch_tokenizer, lend_tokenizer, require_corpus
from farflock.node.run.data_section import DataSection
from farflock.node.run.manifest import resolve
from farflock.node.state.tokenizer_cache import cached_tokenizer
from farflock.node.tokens.json_tokenizer import JsonTokenizer, chunk_names
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer
from farflock.swarm.chunk_store import Store
from farflock.swarm.frame import unpack
from farflock.swarm.messages import MAX_CHUNK_BYTES
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.sim.network import LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

# JSON may end in white space: a tokenizer of two chunks
RAW = train_tokenizer(["the cat and the hat, and that is that.\n"], 270)
LARGE = RAW + b" " * MAX_CHUNK_BYTES


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("FARFLOCK_HOME", str(tmp_path / "home"))


def trained_on(corpus):
    return resolve(
        {"model": {"preset": "tiny"}, "data": {"corpus": corpus, "sha256": "ab" * 32}}
    ).data


def test_a_text_that_is_missing_here_is_named_with_its_hash_and_its_place(tmp_path):
    text = tmp_path / "own.txt"
    with pytest.raises(RefusedByRun) as error:
        require_corpus(trained_on(str(text)))
    assert str(error.value) == (
        f"the run trains on {str(text)!r}, which is not on this machine: it has SHA-256"
        f" {'ab' * 8}…, and there is no file {text}; get that file from the run's founder, and"
        " put it there"
    )


def test_a_text_that_is_here_and_the_shipped_one_are_fine(tmp_path):
    (tmp_path / "own.txt").write_text("To be, or not to be\n")
    require_corpus(trained_on(str(tmp_path / "own.txt")))
    require_corpus(trained_on("shakespeare"))


def described(raw, **change):
    data = DataSection(
        sha256="0" * 64,
        tokenizer=JsonTokenizer(raw).hash,
        tokenizer_bytes=len(raw),
        tokenizer_chunks=chunk_names(raw),
        vocabulary=JsonTokenizer(raw).vocab_size,
    )
    return msgspec.structs.replace(data, **change)


def fetched(data, *holders):
    """What is kept after a newcomer asked members that lend these tokenizers."""

    async def main():
        network = SimNetwork(1, LinkModel(2**21, 2**21))
        tasks = set()

        def spawn(work):
            tasks.add(asyncio.get_running_loop().create_task(work))

        for name, tokenizer in enumerate(holders):
            links, store = network.links(str(name)), Store(2**30)
            lend_tokenizer(store, tokenizer)
            context = PeerContext("run", 0, 1, links, store, spawn)

            async def serve(links=links, context=context):
                while True:
                    sender, packed = await links.receive()
                    frame = unpack(packed)
                    context.chunks.receive(sender, frame.message, frame.body)

            spawn(serve())
        names = [str(name) for name in range(len(holders))]
        try:
            await fetch_tokenizer(network.links("newcomer"), "run", data, names)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run_virtual(main())
    return cached_tokenizer(data.tokenizer)


@pytest.mark.parametrize("raw", [RAW, LARGE], ids=["one chunk", "two chunks"])
def test_a_newcomer_gets_the_tokenizer_from_whichever_member_has_it(raw):
    assert fetched(described(raw), ByteTokenizer(), JsonTokenizer(raw)) == raw


def test_one_that_is_here_or_bytes_are_not_asked_for():
    assert fetched(described(RAW), JsonTokenizer(RAW)) == RAW
    assert fetched(described(RAW)) == RAW
    bytes_alone = {"tokenizer_bytes": None, "tokenizer_chunks": None, "vocabulary": None}
    fetched(described(RAW, tokenizer="bytes", **bytes_alone))


def test_if_no_member_has_it_the_newcomer_does_not_join():
    with pytest.raises(Failure, match=r"no member sent .* bytes of it within 120 s; check"):
        fetched(described(RAW), ByteTokenizer())


def test_chunks_that_make_up_another_file_are_not_kept():
    data = described(RAW, tokenizer="12" * 32)
    with pytest.raises(RefusedByRun, match="do not make up the file with that hash"):
        fetched(data, JsonTokenizer(RAW))
    assert not os.path.exists(os.environ["FARFLOCK_HOME"])
