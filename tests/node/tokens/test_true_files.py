"""The tokenizers of published models give the ids that their models were trained with.

`make compat` fetches the files; elsewhere these tests are skipped.
"""

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from fetch_tokenizers import FILES

from farflock.node.errors import Usage
from farflock.node.run.manifest import parse, resolve
from farflock.node.tokens.json_tokenizer import JsonTokenizer

FOLDER = Path(__file__).parents[3] / "build" / "compat"
TEXT = "The quick brown fox, 1234 — déjà vu.\n\tdef f(x):\n  return x  # 한글 😀"
KNOWN = {  # tokens, the end of a text, the first ids of TEXT
    "llama3": (128_256, "<|end_of_text|>", [791, 4062, 14198, 39935, 11, 220]),
    "qwen3": (151_669, "<|endoftext|>", [785, 3974, 13876, 38835, 11, 220]),
    "gemma3": (262_145, "<eos>", [818, 3823, 8864, 37423, 236764, 236743]),
}


@pytest.fixture(params=FILES)
def true(request):
    """A published tokenizer's name and file."""
    path = FOLDER / f"{request.param}.json"
    if not path.exists():
        pytest.skip(f"the tokenizer of {request.param} is not here; `make compat` fetches it")
    return request.param, path


def test_it_is_read_with_its_vocabulary_and_its_end_of_text(true):
    name, path = true
    tokenizer = JsonTokenizer(path.read_bytes())
    vocabulary, end, first = KNOWN[name]
    assert (tokenizer.vocab_size, tokenizer.end_name) == (vocabulary, end)
    assert tokenizer.hash == FILES[name]
    assert tokenizer.encode(TEXT).tolist()[: len(first)] == first


def test_its_ids_are_those_of_the_library_and_the_text_comes_back(true):
    _, path = true
    tokenizer = JsonTokenizer(path.read_bytes())
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.uint32
    library = tokenizers.Tokenizer.from_file(str(path))
    assert ids.tolist() == library.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids.tolist()) == TEXT
    many = [TEXT, "", TEXT * 3]
    assert [each.tolist() for each in tokenizer.encode_batch(many)] == [
        tokenizer.encode(each).tolist() for each in many
    ]


def test_a_text_that_spells_its_special_tokens_has_none_of_them(true):
    _, path = true
    tokenizer = JsonTokenizer(path.read_bytes())
    assert tokenizer.end_of_text not in tokenizer.encode(f"a {tokenizer.end_name} b")


def test_a_run_names_it_and_a_model_that_is_too_small_is_refused(true, tmp_path, monkeypatch):
    monkeypatch.setenv("FARFLOCK_HOME", str(tmp_path))
    name, path = true
    run = {"model": {"preset": "tiny"}, "data": {"tokenizer": str(path)}}
    manifest = resolve({section: dict(values) for section, values in run.items()})
    assert parse(manifest.canonical()) == manifest
    assert manifest.model.vocab_size == KNOWN[name][0]
    assert sum(size for _, size in manifest.data.chunks()) == path.stat().st_size
    run["model"]["vocab_size"] = 65_536
    with pytest.raises(Usage, match=r"model.vocab_size: 65536: the tokenizer .* tokens; set it"):
        resolve(run)
