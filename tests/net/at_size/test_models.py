"""Models that transformers has made, of 30 million parameters and more, trained by real processes:
evaluated before the first round as transformers does, whole and by stages of three machines, of
which all but the first begin with an empty disk, and taken home as the model that transformers
then reads."""

import json
import shutil
import subprocess

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from worlds.node_processes import COMMAND, ROOT
from worlds.prepared import prepared
from worlds.waiting import output_of

from farflock.node.assembly.text import RunText
from farflock.node.model.corpus import load_corpus
from farflock.node.model.data import evaluation_rows
from farflock.node.model.weights_folder import INDEX_NAME
from farflock.node.state.saved_model import open_model
from farflock.node.tokens.tokenizer import ByteTokenizer

LIMIT_S = 1200
pytestmark = [pytest.mark.net, pytest.mark.long, pytest.mark.timeout(LIMIT_S)]

SEQ, SEQUENCES, STEPS = 32, 64, 200
TOKENS = STEPS * 2 * SEQ
CLOSE = 1e-4
SAVED_S = 60  # a checkpoint has hundreds of megabytes
SIZES = {
    "vocab_size": 260,
    "hidden_size": 512,
    "intermediate_size": 1280,
    "num_hidden_layers": 11,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": ("LlamaConfig", {"rope_scaling": LLAMA3}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
}
WHOLE = """
[run]
name = "size"
seed = 1
total_tokens = {tokens}
[model]
from = "{model}"
[train]
batch = {batch}
seq = {seq}
lr = 1e-3
[evaluation]
every = {every}
sequences = {sequences}
[exchange]
view_s = 2.0
start_peers = {peers}
deadline_s = 60.0
[method]
name = "diloco"
options = {{ period = 10 }}
"""
STAGES = (
    WHOLE
    + """
[pipeline]
stages = 3
batch = 2
codec = "raw"
"""
)


@pytest.fixture(params=FAMILIES)
def model(request, tmp_path):
    """A folder with a model of a family, in three shards or more."""
    transformers = pytest.importorskip("transformers")
    name, terms = FAMILIES[request.param]
    torch.manual_seed(7)
    config = getattr(transformers, name)(**SIZES, **terms)
    made = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(weight.numel() for weight in made.parameters()) >= 30_000_000
    made.save_pretrained(tmp_path / "base", max_shard_size="50MB")
    index = json.loads((tmp_path / "base" / INDEX_NAME).read_text())
    assert len(set(index["weight_map"].values())) >= 3
    return tmp_path / "base"


@pytest.fixture
def content(tmp_path):
    """Plays as prepared data, in parts of which some are held out."""
    text, texts = load_corpus("shakespeare").train, tmp_path / "texts"
    texts.mkdir()
    for start in range(0, len(text), 5000):
        (texts / f"{start}.txt").write_text(text[start : start + 5000])
    return prepared(texts, tmp_path / "prepared", held_out=0.1).content


def loaded(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def theirs(folder, content):
    """The mean loss that transformers has on the run's held-out sequences."""
    held_out = RunText((content,), (1.0,), ByteTokenizer()).held_out()
    rows = evaluation_rows(held_out, SEQ, SEQUENCES).astype(np.int64)
    made, losses = loaded(folder), []
    for part in torch.from_numpy(rows).split(16):
        logits = made(part[:, :-1]).logits
        losses.append(cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none"))
    return float(torch.cat(losses).double().mean())


def founded(run, text, content, **terms):
    """Start a run; return its founder, who alone has the model and the data."""
    run.saved_s = SAVED_S
    terms |= {"seq": SEQ, "sequences": SEQUENCES, "tokens": TOKENS}
    (run.folder / "run.toml").write_text(text.format(**terms))
    founder = run.start("founder", "run", run.folder / "run.toml", "--data", content.folder)
    run.invite = founder.reaches(lambda status: status["invite"])["invite"]
    return founder


def are_done(nodes):
    """Wait until they have ended a run that takes longer than one wait may: step by step."""
    step, nearly = -1, TOKENS * 9 // 10
    while step is not None:
        status = nodes[0].reaches(
            lambda status, step=step: status["step"] > step or status["tokens"] >= nearly
        )
        step = status["step"] if status["tokens"] < nearly else None
    for node in nodes:
        node.is_done()


def curve(node):
    return {event["round"]: event["loss"] for event in node.events("evaluation")}


def require_taken_home(folder, target, nursery):
    """Export a model, and require that transformers computes what this package does."""
    words = [*COMMAND, "export", str(folder), str(target), "--dtype", "fp32"]
    exporting = nursery.popen(words, cwd=ROOT, stdout=subprocess.PIPE)
    output_of(exporting, "the export")
    assert exporting.returncode == 0
    tokens = torch.arange(2 * SEQ).mul(7).remainder(250).view(2, SEQ)
    with torch.no_grad():
        ours, other = open_model(folder).model(tokens), loaded(target)(tokens).logits
    assert float((ours - other).abs().max()) < CLOSE


def require_learnt(nodes, wanted):
    """Require that all know one curve, which begins where transformers is, and falls."""
    values, *others = map(curve, nodes)
    assert values[0] == pytest.approx(wanted, abs=CLOSE)
    assert values[max(values)] < wanted - 1
    assert all(other == values for other in others)


def test_three_machines_train_what_none_of_them_holds(run, model, content, nursery, tmp_path):
    wanted = theirs(model, content)
    founder = founded(run, STAGES, content, model=model, batch=1, every=10, peers=3)
    mates = [run.join(f"mate-{stage}", "--role", f"stage:{stage}") for stage in (1, 2)]
    are_done([founder, *mates])
    require_learnt([founder, *mates], wanted)
    for stage, mate in enumerate(mates, 1):
        place = f"checkpoints/stage-{stage}"
        shutil.copytree(mate.folder / place, founder.folder / place)
    require_taken_home(founder.folder, tmp_path / "home", nursery)


def test_a_joiner_with_an_empty_disk_trains_the_whole_model(run, model, content, nursery, tmp_path):
    wanted = theirs(model, content)
    founder = founded(run, WHOLE, content, model=model, batch=2, every=5, peers=2)
    mate = run.join("mate")
    are_done([founder, mate])
    require_learnt([founder, mate], wanted)
    require_taken_home(mate.folder, tmp_path / "home", nursery)
