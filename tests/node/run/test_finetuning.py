"""The manifest that `farflock finetune` writes."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.folders.model_folder import EXPERTS, SMALL, write_model

from farflock.node.data.index import DataIndex, DataPage, DataSource
from farflock.node.errors import Usage
from farflock.node.model.lora import ADAPTER_TARGETS, ATTENTION_TARGETS, LoraTerms
from farflock.node.run.finetuning import MIN_ROUNDS, Finetuning, finetuning_tables
from farflock.node.run.manifest import resolve


def index_of(tokens):
    page = DataPage(sha256="0" * 64, size=1, pieces=("0" * 64,), shards=1, tokens=tokens)
    source = DataSource(documents=1, tokens=tokens, pages=(page,))
    return DataIndex(vocabulary=256, token_bytes=2, end_of_text=255, sources={"text": source})


@pytest.fixture
def base(tmp_path):
    return write_model(tmp_path / "base")


def tables_of(terms, base, tokens=20_000, config=SMALL):
    return finetuning_tables(terms, base, config, base / "data", index_of(tokens))


def test_it_describes_a_run_of_adapters_beside_the_base(base):
    tables = tables_of(Finetuning(rank=4, epochs=2.5), base)
    assert tables.pop("data") == {"from": str(base / "data")}
    manifest = resolve(tables)
    assert manifest.train.lora == LoraTerms(r=4, alpha=8.0, targets=ADAPTER_TARGETS)
    assert manifest.run.total_tokens == 50_000
    assert manifest.train.seq == SMALL.context == 64
    assert manifest.model.start is not None


@given(st.integers(16, 10**9), st.integers(1, 64), st.floats(1.0, 10.0))
def test_a_run_has_rounds_and_evaluations_however_short_it_is(tokens, batch, epochs):
    terms = Finetuning(batch=batch, seq=8, epochs=epochs)
    try:
        tables = finetuning_tables(terms, Path("base"), SMALL, Path("data"), index_of(tokens))
    except Usage:
        assert int(epochs * tokens) < batch * 8
        return
    steps = tables["run"]["total_tokens"] // (batch * 8)
    rounds = steps // tables["method"]["options"]["period"]
    assert rounds >= min(steps, MIN_ROUNDS)
    assert rounds // tables["evaluation"]["every"] >= 1 or not rounds


def test_a_model_of_experts_has_adapters_at_its_attention(tmp_path):
    base = write_model(tmp_path / "experts", EXPERTS)
    tables = tables_of(Finetuning(), base, config=EXPERTS)
    assert tables["train"]["lora"]["targets"] == list(ATTENTION_TARGETS)


def test_data_of_less_than_a_step_is_refused(base):
    with pytest.raises(Usage, match="less than a step of 8 sequences of 64 tokens; add data"):
        tables_of(Finetuning(seq=64), base, tokens=400)


def test_short_data_have_short_sequences(base):
    assert tables_of(Finetuning(), base, tokens=400)["train"]["seq"] == 49
    assert msgspec.to_builtins(SMALL)["context"] > 49
