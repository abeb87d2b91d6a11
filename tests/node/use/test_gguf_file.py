"""GGUF files hold the weights, in llama.cpp's order, and tokens that give the same ids."""

import logging

import msgspec
import numpy as np
import pytest
import torch

from farflock.node.model.export import byte_level
from farflock.node.model.llama import PRESETS, RopeScaling, build
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer
from farflock.node.use.gguf_file import _CUTS, GgufRefused, gguf_writer, interleaved

gguf = pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

TINY = PRESETS["tiny"]
WIDE = msgspec.structs.replace(
    TINY, dim=64, heads=4, kv_heads=2, ffn_dim=96, tied=False, vocab_size=300
)
SCALED = msgspec.structs.replace(
    WIDE, rope_scaling=RopeScaling(factor=8.0, low=1.0, high=4.0, trained_context=32)
)
TEXT = "the cat and the hat, 'tis 2026: café 한글 \n\n x" * 9


@pytest.fixture(scope="module")
def tokenizer():
    return JsonTokenizer(train_tokenizer([TEXT], 290))


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("gguf").setLevel(logging.WARNING)


def write(path, config, tokenizer, dtype="float32", **options):
    model = build(config, 3)
    gguf_writer(config, model.state_dict(), tokenizer, dtype, **options)(path)
    return model


def read(path):
    """The tensors of a file by name, as torch has them."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = [int(size) for size in tensor.shape[::-1]]
        raw = torch.from_numpy(np.array(tensor.data).reshape(-1).view(np.uint8).copy())
        kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        found[tensor.name] = raw.view(kind[tensor.tensor_type.name]).view(shape)
    return found


def field(path, name):
    return gguf.GGUFReader(path).get_field(name).contents()


OURS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def there(name):
    """A tensor's name in the file, written down by hand."""
    name = name.removeprefix("model.")
    for ours, theirs in OURS.items():
        if name.startswith("layers."):
            name = name.replace(f".{ours}.weight", f".{theirs}.weight")
    whole = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    return (
        name.replace("layers.", "blk.")
        if "." in name.removesuffix(".weight")
        else (f"{whole[name.removesuffix('.weight')]}.weight")
    )


def uninterleaved(weight, heads):
    """Row 2i of a head back to row i, and row 2i + 1 to row i + K/2, one by one."""
    width, rows = weight.shape[0] // heads, torch.empty_like(weight)
    for head in range(heads):
        for pair in range(width // 2):
            for half in range(2):
                rows[head * width + half * width // 2 + pair] = weight[
                    head * width + 2 * pair + half
                ]
    return rows


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("config", [WIDE, TINY], ids=["wide", "tied"])
def test_the_weights_read_back_are_those_of_the_model(tmp_path, tokenizer, config, dtype):
    own = tokenizer if config is WIDE else ByteTokenizer()
    model = write(tmp_path / "m.gguf", config, own, dtype)
    found = read(tmp_path / "m.gguf")
    for name, weight in model.state_dict().items():
        back = found.pop(there(name))
        kind = torch.float32 if weight.dim() == 1 else getattr(torch, dtype)
        for part, heads in (("q_proj", config.heads), ("k_proj", config.kv_heads)):
            back = uninterleaved(back, heads) if part in name else back
        assert back.dtype == kind
        assert torch.equal(back, weight.to(kind)), name
    assert not found


def test_the_order_of_rows_is_that_of_llama_cpp():
    rows = torch.arange(8)[:, None]
    assert interleaved(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("config", [WIDE, SCALED], ids=["plain", "scaled"])
def test_pairs_of_neighbours_rotate_as_our_halves_do(tmp_path, tokenizer, config):
    model = write(tmp_path / "m.gguf", config, tokenizer)
    found, x = read(tmp_path / "m.gguf"), torch.randn(5, 64, generator=torch.manual_seed(0))
    base = field(tmp_path / "m.gguf", "llama.rope.freq_base")
    factors = found.get("rope_freqs.weight", torch.ones(8))
    angles = torch.arange(5)[:, None] * (base ** (-torch.arange(0, 16, 2) / 16) / factors)

    def scores(queries, keys):
        return torch.einsum("qhk,jhk->hqj", queries, keys.repeat_interleave(2, 1))

    def theirs(weight, heads):
        even, odd = (x @ weight.T).view(5, heads, 8, 2).unbind(-1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(2)

    def ours(weight, heads):
        cos, sin = model.get_buffer("cos")[:5, None], model.get_buffer("sin")[:5, None]
        first, second = (x @ weight.T).view(5, heads, 16).chunk(2, -1)
        whole = torch.cat((first, second), -1)
        return whole * cos + torch.cat((-second, first), -1) * sin

    attention = model.blocks()[0].self_attn
    expected = scores(ours(attention.q_proj.weight, 4), ours(attention.k_proj.weight, 2))
    got = scores(theirs(found["blk.0.attn_q.weight"], 4), theirs(found["blk.0.attn_k.weight"], 2))
    torch.testing.assert_close(got, expected)


def test_transformers_computes_the_same_from_the_file(tmp_path, tokenizer):
    transformers = pytest.importorskip("transformers")
    model = write(tmp_path / "m.gguf", WIDE, tokenizer)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    ).eval()
    ids = torch.arange(60)[None] % 290
    with torch.no_grad():
        assert float((model(ids) - other(ids).logits).abs().max()) <= 1e-5


def test_the_file_says_what_the_model_is(tmp_path, tokenizer):
    path = tmp_path / "m.gguf"
    write(path, WIDE, tokenizer, "bfloat16", name="Two towers", template="{{ messages }}")
    said = {
        "general.architecture": "llama",
        "general.name": "Two towers",
        "general.file_type": 32,
        "llama.context_length": 64,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": 300,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }
    assert {name: field(path, name) for name in said} == said
    assert field(path, "llama.attention.layer_norm_rms_epsilon") == pytest.approx(1e-5)


@pytest.mark.parametrize("kind", ["file", "bytes"])
def test_tokens_and_merges_are_those_of_the_tokenizer(tmp_path, tokenizer, kind):
    path, own = tmp_path / "m.gguf", tokenizer if kind == "file" else ByteTokenizer()
    write(path, WIDE, own)
    described = msgspec.json.decode(tokenizer.raw if kind == "file" else byte_level())
    names, kinds = field(path, "tokenizer.ggml.tokens"), field(path, "tokenizer.ggml.token_type")
    assert len(names) == len(kinds) == 300
    assert {name: names.index(name) for name in described["model"]["vocab"]} == (
        described["model"]["vocab"]
    )
    control, unused = int(gguf.TokenType.CONTROL), int(gguf.TokenType.UNUSED)
    assert [place for place, kind in enumerate(kinds) if kind == control] == [own.end_of_text]
    assert [place for place, kind in enumerate(kinds) if kind == unused] == list(
        range(own.vocab_size, 300)
    )
    merges = field(path, "tokenizer.ggml.merges") if kind == "file" else []
    assert merges == [" ".join(pair) for pair in described["model"]["merges"]]


def test_transformers_gives_the_ids_of_the_tokenizer_from_the_file(tmp_path, tokenizer):
    transformers = pytest.importorskip("transformers")
    write(tmp_path / "m.gguf", WIDE, tokenizer)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ids = other(TEXT, add_special_tokens=False)["input_ids"]
    assert ids == tokenizer.encode(TEXT).tolist()


def changed(raw, **parts):
    described = msgspec.json.decode(raw)
    described["model"] |= parts.pop("model", {})
    return JsonTokenizer(msgspec.json.encode(described | parts))


def splits(pattern):
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [cut, bytes_of | {"trim_offsets": False}]}


@pytest.mark.parametrize(("cut", "name"), _CUTS.items(), ids=_CUTS.values())
def test_cuts_that_llama_cpp_knows_have_its_name(tmp_path, tokenizer, cut, name):
    pattern, ignoring = cut
    parts = {} if pattern is None else {"pre_tokenizer": splits(pattern)}
    own = changed(tokenizer.raw, model={"ignore_merges": ignoring}, **parts)
    write(tmp_path / "m.gguf", WIDE, own)
    assert field(tmp_path / "m.gguf", "tokenizer.ggml.pre") == name


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "is not byte-level BPE"),
        ({"pre_tokenizer": None}, "is not byte-level BPE"),
        ({"pre_tokenizer": splits("[a-z]+")}, "cuts or changes texts"),
        ({"pre_tokenizer": splits("x")["pretokenizers"][1]}, "cuts or changes texts"),
        ({"normalizer": {"type": "Lowercase"}}, "cuts or changes texts"),
        ({"model": {"ignore_merges": True}}, "cuts or changes texts"),
        ({"model": {"byte_fallback": True}}, "is not byte-level BPE"),
    ],
)
def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused(tokenizer, parts, reason):
    with pytest.raises(GgufRefused, match=f"{reason}.*convert_hf_to_gguf"):
        gguf_writer(WIDE, {}, changed(tokenizer.raw, **parts), "float32")


def test_a_model_of_experts_is_refused(tokenizer):
    experts = msgspec.structs.replace(WIDE, experts=4, experts_per_token=2, balance=0.01)
    with pytest.raises(GgufRefused, match=r"of experts is not written as GGUF; leave out --gguf"):
        gguf_writer(experts, {}, tokenizer, "float32")


def test_without_the_package_its_name_is_said(tokenizer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(GgufRefused, match=r"pip install \"farflock\[gguf\]\""):
        gguf_writer(WIDE, {}, tokenizer, "float32")
