"""`farflock finetune` in real processes: peers that hold the model in unequal precision train the
same adapters, and peft takes them."""

import json

import pytest
import torch
from worlds.folders.model_folder import SMALL, write_model

from farflock.node.model.export import tokenizer_files
from farflock.node.state.checkpoint import latest
from farflock.node.state.saved_model import open_model
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.use.adapter_file import read_adapters, write_adapters
from farflock.optimizers.parts.state import state_hash

pytestmark = [pytest.mark.net, pytest.mark.ci_more, pytest.mark.timeout(400)]

PAIRS = [{"prompt": f"{n} + 1 = ", "completion": f"{n + 1}."} for n in range(400)]
TERMS = ("--epochs", "20", "--seq", "32", "--batch", "8", "--lr", "0.02", "--rank", "4")
EXCHANGE = ("--set", "exchange.view_s=1", "--set", "exchange.start_peers=2")


@pytest.fixture
def base(tmp_path):
    folder = write_model(tmp_path / "base", shards=3)
    for name, raw in tokenizer_files(ByteTokenizer(), SMALL.context).items():
        (folder / name).write_bytes(raw)
    return folder


@pytest.fixture
def conversations(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return path


def test_peers_with_unequal_bases_train_adapters_that_peft_takes(
    run, base, conversations, tmp_path, monkeypatch
):
    monkeypatch.setenv("FARFLOCK_HOME", str(tmp_path / "home"))
    words = ("finetune", base, "--data", conversations, *TERMS, *EXCHANGE)
    founder = run.start("founder", *words)
    run.invite = founder.reaches(lambda status: status["invite"])["invite"]
    joiner = run.join("joiner", "--base-precision", "int8")
    founder.is_done()
    joiner.is_done()

    # the joiner had nothing: the model came from the founder, file by file
    (cached,) = (tmp_path / "home").rglob("bases/*/model.safetensors.index.json")
    shards = sorted(path.name for path in base.glob("*.safetensors"))
    assert sorted(path.name for path in cached.parent.glob("*.safetensors")) == shards
    assert all((cached.parent / name).read_bytes() == (base / name).read_bytes() for name in shards)

    saved = [latest(node.folder / "checkpoints") for node in (founder, joiner)]
    first, second = (state_hash(each.parts["method"]) for each in saved)
    assert first == second
    measured = [event["loss"] for event in founder.events("evaluation")]
    (start,) = (event["loss"] for event in founder.events("start"))
    assert measured[-1] < start - 0.5
    assert not founder.events("difference")

    model = open_model(founder.folder)
    told = model.config, model.base.lora, model.weights, str(base)
    write_adapters(tmp_path / "adapters", *told)
    assert read_adapters(tmp_path / "adapters", SMALL).terms == model.base.lora
    _require_equal_in_peft(model, base, tmp_path / "adapters")


def _require_equal_in_peft(model, base, adapters):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokens = torch.arange(48)[None]
    with torch.no_grad():
        wanted = model.model(tokens)
        torch.testing.assert_close(
            peft.PeftModel.from_pretrained(theirs, adapters)(tokens).logits,
            wanted,
            rtol=1e-4,
            atol=1e-4,
        )


def test_the_same_command_goes_on_after_a_stop(run, base, conversations):
    words = ("finetune", base, "--data", conversations, *TERMS, "--set", "exchange.view_s=1")
    founder = run.start("founder", *words)
    founder.reaches(lambda status: status["step"] >= 20)
    founder.leaves()
    stopped = latest(founder.folder / "checkpoints").step
    again = run.start("founder", *words)
    again.is_done()
    assert [event["step"] for event in again.events("resumed")] == [stopped]
    assert latest(again.folder / "checkpoints").step > stopped
