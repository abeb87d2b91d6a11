"""`farflock generate` prints text as it is sampled, and chats with the checkpoint's template."""

import json

import msgspec
import pytest
import torch

from farflock.node.cli.output import Output
from farflock.node.model.export import byte_level
from farflock.node.model.generate import GREEDY, Sampling, generate
from farflock.node.model.llama import PRESETS, build
from farflock.node.state import checkpoint
from farflock.node.tokens.chat import chat_tokens
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import ByteTokenizer

TINY = PRESETS["tiny"]
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[model]"


def save(folder, **files):
    files = {"config.json": msgspec.json.encode(TINY)} | files
    parts = {"model": dict(build(TINY, 0).named_parameters())}
    return checkpoint.save(folder, 3, parts, {"run": "ab12"}, files)


def expected(prompt, **options):
    return generate(build(TINY, 0), ByteTokenizer(), prompt, 20, **options)


@pytest.fixture
def sampled(farflock):
    """A function that runs the command on the CPU for 20 tokens."""

    def run(folder, *options):
        return farflock("generate", folder, "--tokens", 20, "--device", "cpu", *options)

    return run


def test_options_of_sampling_reach_the_model(sampled, tmp_path):
    folder = save(tmp_path)
    options = ["--temperature", 1.5, "--top-k", 0, "--top-p", 0.9, "--min-p", 0.01]
    options += ["--repetition-penalty", 1.2, "--seed", 5]
    code, out, _ = sampled(folder, "--prompt", "To be", *options)
    said = expected("To be", sampling=Sampling(1.5, None, 0.9, 0.01, 1.2), seed=5)
    assert (code, out) == (0, f"To be{said}\n")


def test_a_stop_ends_the_text(sampled, tmp_path):
    folder = save(tmp_path)
    said = expected("To be", sampling=GREEDY)
    greedy = ("--prompt", "To be", "--temperature", 0)
    out = sampled(folder, *greedy, "--stop", said[9:11], "--stop", "never")[1]
    assert out == f"To be{said[: said.index(said[9:11])]}\n"


def test_json_holds_the_text_without_the_prompt(sampled, tmp_path):
    folder = save(tmp_path)
    code, out, _ = sampled(folder, "--prompt", "To be", "--temperature", 0, "--json")
    said = {"prompt": "To be", "text": expected("To be", sampling=GREEDY)}
    assert (code, json.loads(out)) == (0, {"checkpoint": str(folder), **said})


def test_pieces_are_printed_as_they_are_sampled(sampled, tmp_path, monkeypatch):
    printed, forward = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(Output, "piece", lambda self, text: printed.append(text))

    def noted(*args, **options):
        printed.append("computed")
        return forward(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    sampled(save(tmp_path), "--prompt", "To be", "--temperature", 0)
    said = [place for place, text in enumerate(printed) if text not in ("computed", "")]
    assert printed[said[0]].startswith("To be")
    assert printed[: said[0]] == ["computed"] * TINY.layers
    assert "computed" in printed[said[0] : said[-1]]


def test_a_terminal_gets_no_commands_from_a_model(capsys, monkeypatch):
    for is_terminal, shown in ((True, "a�[2J\n\tb"), (False, "a\x1b[2J\n\tb")):
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal)
        Output(False).piece("a\x1b[2J\n\tb")
        assert capsys.readouterr().out == shown


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "option"])
def test_a_chat_answers_with_the_template(sampled, tmp_path, place):
    pytest.importorskip("tokenizers")
    about = {"chat_template": TEMPLATE} if place == "tokenizer_config.json" else {}
    files = {"tokenizer.json": byte_level(), "tokenizer_config.json": msgspec.json.encode(about)}
    if place == "chat_template.jinja":
        files[place] = TEMPLATE.encode()
    folder, option = save(tmp_path, **files), ["--chat"]
    if place == "option":
        (tmp_path / "own.jinja").write_text(TEMPLATE)
        option = ["--chat-template", tmp_path / "own.jinja"]
    code, out, _ = sampled(folder, "--prompt", "Why?", "--temperature", 0, *option)
    ids = chat_tokens(JsonTokenizer(byte_level()), TEMPLATE, [{"role": "user", "content": "Why?"}])
    assert bytes(ids) == b"[user] Why?\n[model]"
    assert (code, out) == (0, expected(ids, sampling=GREEDY) + "\n")


def test_a_chat_without_a_template_is_refused_in_words(sampled, tmp_path):
    pytest.importorskip("tokenizers")
    folder = save(tmp_path, **{"tokenizer.json": byte_level()})
    code, _, err = sampled(folder, "--chat")
    assert code == 1
    assert "has no chat template" in err


@pytest.mark.parametrize("raw", [b"\xff", b"[" * 9, b'{"chat_template": [{"name": "a"}]}'])
def test_a_template_that_cannot_be_read_is_refused(sampled, tmp_path, raw):
    folder = save(tmp_path, **{"tokenizer_config.json": raw})
    code, _, err = sampled(folder, "--chat")
    assert code == 1
    assert "the chat template of" in err
    (tmp_path / "bad.jinja").write_bytes(b"\xff")
    code, _, err = sampled(folder, "--chat-template", tmp_path / "bad.jinja")
    assert code == 2
    assert "name a chat_template.jinja" in err
