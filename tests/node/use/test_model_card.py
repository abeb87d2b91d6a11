"""Model cards state the run's facts, and nothing from outside becomes markup."""

import hashlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import farflock
from farflock.node.model.llama import PRESETS
from farflock.node.run.manifest import resolve
from farflock.node.use.model_card import BadCard, CardFacts, code, model_card, plain

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
    found, text = rows(card(dtype="bfloat16")), card()
    assert "\n# Two towers\n" in text
    assert found["parameters"] == f"{TINY.parameters():,}, written as bfloat16"
    assert found["context"] == "64 tokens"
    assert found["run"] == "`ab12`"
    assert found["SHA-256 of the manifest"] == f"`{hashlib.sha256(MANIFEST).hexdigest()}`"
    assert found["data"].startswith("`shakespeare`, SHA-256 `")
    assert found["tokenizer"] == "`bytes`"
    assert found["method"].startswith("`diloco`: ")
    assert "`period = 5`" in found["method"]
    assert (found["tokens"], found["steps"]) == ("6,400 of 64,000", "1,000")
    assert found["Farflock"] == farflock.__version__
    assert head(text)[:2] == ["library_name: transformers", "pipeline_tag: text-generation"]
    assert not [line for line in head(text) if line.startswith(("license", "base_model"))]


def test_the_card_holds_the_manifest_to_start_the_run_again():
    fenced = re.search(r"^```toml\n(.*?)^```$", card(), re.MULTILINE | re.DOTALL)
    assert fenced[1] == MANIFEST.decode()
    assert "farflock run run.toml" in card()


def test_prepared_data_have_a_root_and_sources():
    text = '[data]\nroot = "aa"\n[data.mix]\nweb = 0.7\ncode = 0.3\n[model]\nstart = "cafe"\n'
    found = rows(card(meta={"manifest": text}))
    assert found["root of the data"] == "`aa`"
    assert found["sources of the data, by weight"] == "`web = 0.7`, `code = 0.3`"
    assert found["weights at the start"] == "`cafe`"
    found = rows(card(meta={"manifest": '[data]\nroot = "aa"'}))
    assert found["sources of the data"] == "all, each as often as it has tokens"
    assert "with `--data`" in card(meta={"manifest": '[data]\nroot = "aa"'})


def test_what_is_known_of_members_and_evaluations_is_stated():
    evaluation = {"loss": 2.1, "standard_error": 0.01, "round": 40, "sequences": 64, "by": "x"}
    found = rows(card(meta=META | {"members": {"k1": "ann", "k2": ""}, "evaluation": evaluation}))
    assert found["members"] == "2: `ann`, `k2`"
    assert found["held-out loss"] == (
        "`2.1000` ± `0.0100` nats a token after round `40`, on `64` sequences"
    )
    many = rows(card(meta={"members": [f"m{number}" for number in range(250)]}))["members"]
    assert many.startswith("250: `m0`, `m1`")
    assert many.endswith("`m199`, and 50 more")


def test_the_licence_of_the_manifest_is_the_hubs():
    licensed = card(meta={"manifest": '[run]\nlicence = "Apache-2.0"'})
    assert 'license: "apache-2.0"' in head(licensed)
    assert rows(licensed)["licence"] == "`Apache-2.0`"
    odd = card(meta={"manifest": '[run]\nlicence = "mine: [all]"'})
    assert 'license: "other"' in head(odd)
    assert rows(odd)["licence"] == "`mine: [all]`"


def test_a_base_model_is_named_as_on_the_hub():
    assert 'base_model: "org/some-model"' in head(card(base_model="org/some-model"))
    for name in ("a/b/c", "a\nb", "", "a b", "../x"):
        with pytest.raises(BadCard, match="is not the name of a model on the hub"):
            card(base_model=name)


def test_without_a_run_the_card_says_what_the_model_is():
    text = model_card("my folder", TINY, CardFacts())
    assert "\n# my folder\n" in text
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
        f"[run]\nname = {quoted}\nlicence = {quoted}\n[method]\nname = {quoted}\n"
        f"[method.options]\n{quoted} = 1\n[data]\nroot = {quoted}\n[data.mix]\n{quoted} = 2\n"
    )
    meta = {"manifest": manifest, "run": value, "step": value, "tokens": value}
    text = card(meta=meta | {"members": [value], "evaluation": {"loss": value, "round": value}})
    above, _, _ = text.partition("## Reproduce")
    assert [line for line in above.splitlines() if line.startswith("#")][1:] == ["## Use"]
    table = [line for line in above.splitlines() if line.startswith("|")]
    assert all(line.count("|") == 3 for line in table)
    for line in table[2:]:
        bare = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", line)  # without its code spans
        assert not set(bare) & set("<>[]`#"), line
    assert above.count("---\n") == 2
    assert text.isprintable() or set(text) - {"\n"} == {c for c in text if c.isprintable()}
    fence = re.search(r"^(`{3,})toml$", text, re.MULTILINE)[1]
    assert text.count(f"\n{fence}\n") == (2 if fence == "```" else 1)


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


@given(value=st.text())
def test_a_title_is_plain_words(value):
    title = plain(value)
    assert title
    assert all(char.isalnum() or char in " .-" for char in title)
    assert title[0] not in " -."
