"""Model cards state the run's facts, and nothing from outside becomes markup."""

import hashlib
import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import farflock
from farflock.node.model.llama import PRESETS
from farflock.node.run.manifest import parse, resolve
from farflock.node.train.run_size import StreamSize, stream_sizes
from farflock.node.use.model_card import CardFacts, code, facts_of, model_card, plain

TINY = PRESETS["tiny"]
MANIFEST = resolve(
    {
        "run": {"name": "Two towers", "total_tokens": 64_000},
        "model": {"preset": "tiny"},
        "method": {"name": "diloco", "options": {"period": 5}},
    }
).canonical()
META = {"run": "ab12", "step": 1000, "tokens": 6400, "manifest": MANIFEST.decode()}


def card(title="title", **facts):
    return model_card(title, TINY, CardFacts(**({"meta": META} | facts)))


def rows(text):
    """The table as names and values."""
    return dict(re.findall(r"^\| (.+?) \| (.*) \|$", text, re.MULTILINE))


def head(text):
    return text.split("---\n")[1].splitlines()


def test_the_card_states_the_run():
    found, text = rows(card(dtype="bf16")), card()
    assert "\n# Two towers\n" in text
    assert found["parameters"] == f"{TINY.parameters():,}, written in bf16"
    assert found["context"] == "64 tokens"
    assert found["run"] == "`ab12`"
    assert found["SHA-256 of the manifest"] == f"`{hashlib.sha256(MANIFEST).hexdigest()}`"
    assert found["data"].startswith("`corpus = shakespeare`, `tokenizer = bytes`, `sha256 = ")
    assert found["method"].startswith("`diloco`: ")
    assert "`period = 5`" in found["method"]
    assert "`codec = " in found["exchanges"]
    assert (found["tokens"], found["steps of the peer that saved it"]) == (
        "6,400 of 64,000",
        "1,000",
    )
    assert found["Farflock"] == f"`{farflock.__version__}`"
    assert head(text)[:2] == ["library_name: transformers", "pipeline_tag: text-generation"]
    assert not [line for line in head(text) if line.startswith("license")]


def test_the_card_holds_the_manifest_and_the_command_that_start_the_run_again():
    fenced = re.search(r"^```toml\n(.*?)^```$", card(), re.MULTILINE | re.DOTALL)
    assert fenced[1] == MANIFEST.decode()
    assert "$ farflock run run.toml" in card()
    assert resolve_again(fenced[1]) == MANIFEST


def resolve_again(text):
    return parse(text).canonical()


def test_the_bytes_of_each_stream_are_stated():
    streams = stream_sizes(parse(MANIFEST).plan())
    (stream,) = streams
    said = rows(card(streams=streams))[f"bytes of `{stream.stream}`"]
    assert said == (
        f"at most {stream.out_bytes:,} of a contribution, and {stream.back_bytes:,} of what comes "
        "back, every 5 steps"
    )
    once = StreamSize("main", "pair", 10, 1, 1234, 0, math.inf, 1.0)
    assert rows(card(streams=[once]))["bytes of `main`"] == "at most 1,234 of a contribution"


def test_a_manifest_of_another_version_has_no_streams_but_its_other_facts():
    assert facts_of(META, "bf16") == CardFacts(META, "bf16", stream_sizes(parse(MANIFEST).plan()))
    later = {"manifest": MANIFEST.decode().replace("[run]", "[run]\nflags = 3")}
    assert facts_of(later, "bf16") == CardFacts(later, "bf16")
    assert facts_of({}, "fp32") == CardFacts()


def test_tables_in_a_table_are_listed_and_lists_are_not():
    text = card(meta={"manifest": '[data]\nchunks = ["c"]\n[data.mix]\nab = 2.0\ncd = 1.0\n'})
    assert rows(text)["data"] == "`mix.ab = 2.0`, `mix.cd = 1.0`"
    assert "name their folder, as in `--data FOLDER`" in text
    assert "--data FOLDER`" not in card(), "a corpus needs none"


def test_no_evaluation_is_made_up():
    _, _, behind = card().partition("## Evaluation\n")
    section, _, _ = behind.partition("## ")
    assert "states no measurement" in section
    assert "farflock evaluate . --data FOLDER" in section
    assert not re.search(r"\d", section)


def test_the_run_s_evaluations_are_in_the_card_with_their_picture():
    meta = META | {"evaluations": [[0, 0, 5.545, 0.01], [10, 640, 3.25, 0.125]]}
    _, _, behind = card_of(meta).partition("## Evaluation\n")
    section, _, _ = behind.partition("## ")
    assert "](evaluation.svg)" in section
    assert "3.250 ± 0.125 nats a token, before round 10, at 640 tokens" in section
    assert "](evaluation.svg)" not in card_of(META | {"evaluations": [["<b>", 0, 1.0, 0.1]]})


def card_of(meta):
    return model_card("title", TINY, facts_of(meta, "bf16"))


def test_weights_at_the_start_are_named_with_their_licence():
    text = card(meta={"manifest": '[model]\nweights = "cafe"\nlicence = "Apache-2.0"\n'})
    found = rows(text)
    assert found["weights at the start, by their hash"] == "`cafe`"
    assert found["their licence"] == "`Apache-2.0`"
    assert 'license: "apache-2.0"' in head(text)
    assert "name their folder as `model.from`" in text
    odd = card(meta={"manifest": '[model]\nweights = "cafe"\nlicence = "mine: [all]"'})
    assert 'license: "other"' in head(odd)
    unstated = card(meta={"manifest": '[model]\nweights = "cafe"\nlicence = "unstated"'})
    assert not [line for line in head(unstated) if line.startswith("license")]


def test_members_are_listed_by_their_keys():
    assert rows(card(meta=META | {"members": ["k1", "k2"]}))["members at that time, by key"] == (
        "2: `k1`, `k2`"
    )
    many = rows(card(meta={"members": [f"m{number}" for number in range(250)]}))
    assert many["members at that time, by key"].startswith("250: `m0`, `m1`")
    assert many["members at that time, by key"].endswith("`m199`, and 50 more")


def test_without_a_run_the_card_says_what_the_model_is():
    text = model_card("my folder", TINY, CardFacts())
    assert "\n# my folder\n" in text
    assert "LlamaForCausalLM" in text
    assert "Reproduce" not in text
    assert rows(text).keys() == {"parameters", "context", "Farflock"}


@pytest.mark.parametrize("manifest", ["[run", "x" * 300_000, 7, None, "run = 3\ndata = [1]"])
def test_a_manifest_that_is_none_leaves_its_rows_out(manifest):
    assert "\n# title\n" in card(meta={"manifest": manifest, "run": "ab"})


HOSTILE = (
    "x | y |\n\n# Owned\n",
    "<script>alert(1)</script>",
    "[click](javascript:x)",
    "``` `` `",
    "a`b",
    "--- \nlicense: mit",
    "\u202eevil\x1b[2J",
    "\\|",
)


@pytest.mark.parametrize("value", HOSTILE)
def test_what_others_chose_is_never_markup(value):
    quoted = json.dumps(value)
    manifest = (
        f"[run]\nname = {quoted}\n[method]\nname = {quoted}\n[method.options]\n{quoted} = 1\n"
        f"[model]\nweights = {quoted}\nlicence = {quoted}\n[data]\n{quoted} = {quoted}\n"
        f"[exchange]\ncodec = {quoted}\n"
    )
    meta = {"manifest": manifest, "run": value, "step": value, "tokens": value}
    text = card(meta=meta | {"members": [value]})
    above, _, _ = text.partition("## Reproduce")
    assert [line for line in above.splitlines() if line.startswith("#")][1:] == [
        "## Use",
        "## Evaluation",
    ]
    table = [line for line in above.splitlines() if line.startswith("|")]
    assert all(line.count("|") == 3 for line in table)
    for line in table[2:]:
        bare = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", line)  # without its code spans
        assert not set(bare) & set("<>[]`#"), line
    assert above.count("---\n") == 2
    assert all(char.isprintable() or char == "\n" for char in text)
    fence = re.search(r"^(`{3,})toml$", text, re.MULTILINE)[1]
    assert text.rstrip().endswith(f"\n{fence}")


@settings(max_examples=25)
@given(value=st.text())
def test_a_code_span_is_one_span_on_one_line(value):
    span = code(value)
    assert span.isprintable()
    assert "|" not in span
    if span != "—":
        fence = re.match("`+", span)[0]
        assert span.endswith(fence)
        inner = span[len(fence) : -len(fence)]
        assert fence not in re.findall("`+", inner)
        assert len(value) > 200 or inner.strip(" ") == (
            "".join(c if c.isprintable() else " " for c in value).replace("|", "¦").strip(" ")
        )


@settings(max_examples=25)
@given(value=st.text())
def test_a_title_is_plain_words(value):
    title = plain(value)
    assert title
    assert all(char.isalnum() or char in " .-" for char in title)
    assert title[0] not in " -."
