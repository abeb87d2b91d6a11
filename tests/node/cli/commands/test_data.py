"""`farflock data`: what it prints, how it ends, and what it says about each wrong input."""

import json
import signal

import pytest

from farflock.node.data import sorting
from farflock.node.data.prepare import Preparation


@pytest.fixture
def texts(tmp_path):
    """A folder of texts, and the arguments that prepare it."""
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = (json.dumps({"text": f"text {n} " * (n % 30)}) + "\n" for n in range(400))
    (folder / "a.jsonl").write_text("".join(lines))
    (folder / "b.txt").write_text("a text of its own\n" * 200)
    (folder / "c.png").write_bytes(b"x")
    return folder


def arguments(texts, *more):
    target = texts.parent / "out"
    return ("data", "prepare", texts, "--tokenizer", "bytes", "-o", target, *more)


def test_the_last_line_of_json_is_the_contract(farflock, texts):
    code, out, err = farflock(*arguments(texts, "--json"))
    assert code == 0
    (line,) = out.splitlines()
    facts = json.loads(line)
    assert {"root", "shards", "tokens", "vocabulary", "documents", "bytes", "folder"} <= set(facts)
    assert facts["documents"] == 387 - 2, "two are held out, and 14 are empty"
    assert (facts["vocabulary"], facts["shards"]) == (256, 1)
    assert facts["held_out_tokens"] == facts["sources"]["text"]["held_out_tokens"] > 256
    assert "left alone for their endings: 1 .png" in err
    shown = json.loads(farflock("data", "show", facts["folder"], "--verify", "--json")[1])
    assert shown.pop("verified_files") == 3
    assert shown == facts


def test_a_person_reads_a_table_and_the_root(farflock, texts):
    code, out, _ = farflock(*arguments(texts))
    assert code == 0
    assert out.splitlines()[-1].startswith("root ")
    assert "source  documents  tokens  shards  held-out tokens  skipped" in out
    code, shown, _ = farflock("data", "show", texts.parent / "out", "--verify")
    assert (code, shown.splitlines()[-1]) == (0, out.splitlines()[-1])
    assert "all 3 files are whole" in shown


def test_a_damaged_folder_is_refused(farflock, texts):
    farflock(*arguments(texts))
    shard = next((texts.parent / "out" / "shards").iterdir())
    shard.write_bytes(b"x" * shard.stat().st_size)
    code, _, err = farflock("data", "show", texts.parent / "out", "--verify")
    assert code == 3
    assert f"{shard.name} is not the file that the index lists; copy it again" in err


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (("--tokenizer", "none.json"), 1, "none.json cannot be read"),
        (("--held-out", "0.9"), 2, "0.9 is not in the range"),
        (("--shard-bytes", "1"), 2, "--shard-bytes: 1 is out of range; use 4,096 to"),
        (("--field", "a..b"), 2, "--field: 'a..b' has an empty name; use a.b for nested"),
        (("--field", "body"), 1, "a.jsonl, line 1: it has no text in the field 'body'"),
        (("--text-endings", "txt"), 2, "--text-endings: 'txt' is no ending; write .txt,.md"),
        (("none",), 2, "none: No such file or directory; check the path of the source"),
    ],
)
def test_each_wrong_input_is_one_sentence(farflock, texts, options, code, sentence):
    ended, _, err = farflock(*arguments(texts, *options))
    assert (ended, sentence in err.splitlines()[-1]) == (code, True), err
    assert not (texts.parent / "out").exists()


def test_ctrl_c_says_that_the_same_command_goes_on(farflock, texts, monkeypatch):
    monkeypatch.setattr(sorting, "BATCH_PARTS", 50)
    run = Preparation.run

    def interrupted(self, **given):
        def stop(share):
            if share > 0.4:
                signal.raise_signal(signal.SIGINT)

        return run(self, **{**given, "progress": stop})

    with monkeypatch.context() as patch:
        patch.setattr(Preparation, "run", interrupted)
        code, out, _ = farflock(*arguments(texts))
    assert code == 130
    assert "out.partial; the same command goes on from there" in out
    assert not (texts.parent / "out").exists()
    code, out, _ = farflock(*arguments(texts))
    assert code == 0
    assert f"going on with {texts.parent / 'out.partial'}" in out


@pytest.fixture
def chats(tmp_path):
    """Prompts and completions, and the arguments that prepare them."""
    path = tmp_path / "texts" / "chats.jsonl"
    path.parent.mkdir()
    pairs = ({"prompt": f"What is {n}? ", "completion": f"It is {n}."} for n in range(400))
    path.write_text("".join(json.dumps(each) + "\n" for each in pairs))
    return path.parent


CHATML = (
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_conversations_say_which_share_is_learned(farflock, chats):
    code, out, _ = farflock(*arguments(chats, "--chat", "--json"))
    facts = json.loads(out.splitlines()[-1])
    assert code == 0
    assert 0.4 * facts["tokens"] < facts["answer_tokens"] < 0.6 * facts["tokens"]
    code, out, _ = farflock("data", "show", facts["folder"])
    share = facts["answer_tokens"] / facts["tokens"]
    assert f"the loss counts answers only: {share:.1%} of the tokens" in out
    (again,) = farflock("data", "show", facts["folder"], "--json")[1].splitlines()
    assert json.loads(again) == facts


def test_texts_say_nothing_of_answers(farflock, texts):
    code, out, _ = farflock(*arguments(texts, "--json"))
    assert code == 0
    assert "answer" not in out


@pytest.mark.parametrize("place", ["beside the tokenizer", "option"])
def test_a_template_comes_from_the_tokenizers_folder_or_from_an_option(farflock, chats, place):
    pytest.importorskip("tokenizers")
    from farflock.node.model.export import byte_level

    folder = chats.parent / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(byte_level())
    name = "chat_template.jinja" if place != "option" else "other.jinja"
    (folder / name).write_text(CHATML)
    more = ("--chat-template", folder / name) if place == "option" else ("--chat",)
    code, out, err = farflock(*arguments(chats, "--tokenizer", folder, "--json", *more))
    assert code == 0, err
    longer = json.loads(out)["tokens"]
    plain = ("data", "prepare", chats, "--chat", "-o", chats.parent / "plain", "--json")
    assert longer > json.loads(farflock(*plain)[1])["tokens"] + 380 * len("<user><assistant>")


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (("--field", "x"), 2, "--field: a conversation is in messages, or in prompt and completi"),
        (("shakespeare",), 2, "shakespeare: it has no conversations; name files of JSON lines"),
        (("--chat-template", "none.jinja"), 1, "none.jinja: No such file or directory"),
    ],
)
def test_each_wrong_input_of_conversations_is_one_sentence(
    farflock, chats, options, code, sentence
):
    ended, _, err = farflock(*arguments(chats, "--chat", *options))
    assert (ended, sentence in err.splitlines()[-1]) == (code, True), err
    assert not (chats.parent / "out").exists()


def test_a_line_without_an_answer_stops_or_is_counted(farflock, chats):
    with (chats / "chats.jsonl").open("a") as file:
        file.write('{"prompt": "p"}\n')
    code, _, err = farflock(*arguments(chats, "--chat"))
    assert code == 1
    assert "chats.jsonl, line 401: it is no conversation; write messages" in err
    code, out, _ = farflock(*arguments(chats, "--chat", "--errors", "skip", "--json", "--force"))
    assert (code, json.loads(out.splitlines()[-1])["skipped"]) == (0, 1)
