"""A manifest resolves to one text, says where it is wrong, and cannot take memory or read files."""

import hashlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.node.errors import FarflockError, RefusedByRun, Usage
from farflock.node.model.corpus import load_corpus
from farflock.node.model.llama import PRESETS
from farflock.node.run.head import (
    MAX_LIST_BYTES,
    PROTOCOL,
    BadHead,
    Head,
    require_same_protocol,
    seal_head,
    unseal_head,
)
from farflock.node.run.manifest import (
    demo_manifest,
    load,
    override,
    parse,
    resolve,
    simulated_default,
)
from farflock.node.run.sections import MAX_MANIFEST_BYTES
from farflock.optimizers.catalog import METHODS, method, unfolded
from farflock.optimizers.catalog import PRESETS as METHOD_PRESETS
from farflock.optimizers.parts.outer import OuterHeavyBall, OuterNesterov
from farflock.swarm.identity import Identity
from farflock.swarm.messages import MAX_HEAD_BYTES

IDENTITY = Identity.from_seed(bytes(32))


def resolved(*assignments):
    return simulated_default(assignments)


@pytest.fixture
def described():
    """A manifest as a founder writes one."""
    return """
        [run]
        name = "plays"
        total_tokens = 2_000_000

        [model]
        preset = "tiny"
        layers = 3

        [train]
        seq = 32

        [method]
        name = "diloco"
        options = { period = 20, outer = { name = "heavyball", lr = 0.5 } }

        [exchange]
        codec = "int8"
    """


@pytest.fixture
def written(tmp_path, described):
    path = tmp_path / "run.toml"
    path.write_text(described)
    return path


# Resolving


def test_what_the_founder_leaves_out_is_spelt_out(written):
    manifest = load(written)
    assert manifest.model.shape == msgspec.structs.replace(PRESETS["tiny"], layers=3)
    assert manifest.train.warmup_tokens == 100_000
    assert manifest.data.sha256 == load_corpus("shakespeare").sha256
    assert manifest.method.options == {
        "period": 20,
        "outer": {"name": "heavyball", "lr": 0.5},
        "weights": "uniform",
    }
    assert (manifest.exchange.codec, manifest.exchange.return_codec) == ("int8", "bf16")


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_gives_one_text_that_gives_the_same_manifest_again(name):
    manifest = demo_manifest(name, peers=4, steps=100)
    text = manifest.canonical().decode()
    assert parse(text) == manifest
    assert parse(text.encode()).canonical().decode() == text
    assert parse(text).hash() == manifest.hash()


@pytest.mark.parametrize("name", sorted(METHOD_PRESETS))
def test_a_preset_of_a_method_is_spelt_out_and_the_founders_own_options_win(name):
    base, options = unfolded(name)
    plain, own = demo_manifest(name, peers=4, steps=100), {"period": 9, "decay": 0.5}
    other = resolve({"method": {"name": name, "options": own}, "exchange": {"codec": "int8"}})
    for manifest, expected in ((plain, options), (other, options | own | {"codec": "int8"})):
        assert manifest.method.name == base
        assert expected.items() <= manifest.plan().options.items()
        assert parse(manifest.canonical()) == manifest


def test_a_resolved_manifest_written_to_a_file_resolves_to_itself(tmp_path):
    manifest = demo_manifest("diloco", peers=2, steps=50)
    path = tmp_path / "run.toml"
    path.write_bytes(manifest.canonical())
    assert load(path).canonical() == manifest.canonical()


def test_sizes_alone_describe_a_model_and_beside_a_preset_replace_its_own():
    sizes = "model={dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=32, context=64}"
    assert resolved(sizes).model.dim == 16
    deeper = msgspec.structs.replace(PRESETS["tiny"], layers=5)
    assert resolved("model.layers=5").model.shape == deeper


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    lr=st.floats(1e-6, 1.0),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,20}", fullmatch=True),
    period=st.integers(1, 10**6),
)
def test_any_values_survive_the_round_trip(seed, lr, name, period):
    manifest = resolve(
        {
            "run": {"seed": seed, "name": name},
            "train": {"lr": lr},
            "method": {"options": {"period": period}},
            "data": {"sha256": "0" * 64},
        }
    )
    assert parse(manifest.canonical()) == manifest


WHOLE_MODELS = f"""\
[run]
name = "plays"
seed = 0
total_tokens = 2000000
protocol = {PROTOCOL}

[model]
vocab_size = 256
dim = 24
layers = 3
heads = 2
kv_heads = 1
ffn_dim = 48
context = 64
tied = true
rope_theta = 10000.0
norm_eps = 1e-05
architecture = "llama"

[data]
corpus = "shakespeare"
tokenizer = "bytes"
sha256 = "0e5986fe2f1b4844712915af1b1ca51c24f1aceeb8ad843bb8b03d9a91fcd9e8"

[train]
batch = 8
seq = 32
accumulate = 1
optimizer = "adamw"
lr = 0.003
warmup_tokens = 100000
min_lr_ratio = 0.1
weight_decay = 0.1
betas = [0.9, 0.95]
nesterov = false
clip = 1.0
autocast = false
joiner_steps = 20

[method]
name = "diloco"

[method.options]
period = 20
weights = "uniform"

[method.options.outer]
name = "heavyball"
lr = 0.5

[exchange]
codec = "int8"
return_codec = "bf16"
deadline_s = 30.0
view_s = 30.0
branch_after_s = 600.0
start_peers = 1

[evaluation]
every = 10
sequences = 256

[trust]
level = "trusted"
"""


def test_a_run_of_whole_models_has_the_text_that_it_had_before_there_were_pipelines(written):
    assert load(written).canonical().decode() == WHOLE_MODELS
    assert parse(WHOLE_MODELS).hash() == hashlib.sha256(WHOLE_MODELS.encode()).hexdigest()


# The run's id and the plan


def test_the_runs_id_depends_on_every_value_and_on_the_founder():
    first = resolved()
    assert first.run_id("a") == resolved().run_id("a")
    others = {
        resolved(change).run_id("a")
        for change in ("run.seed=2", "train.lr=0.001", "exchange.codec=int8")
    }
    assert len({first.run_id("a"), first.run_id("b"), *others}) == 5
    assert len(first.run_id("a")) == 32
    assert set(first.run_id("a")) <= set("0123456789abcdef")


def test_the_plan_is_what_the_manifest_says(written):
    plan = load(written, ("train.clip=0", "run.seed=7")).plan()
    assert (plan.run_seed, plan.seq, plan.clip_norm, plan.model.layers) == (7, 32, None, 3)
    assert (plan.schedule.total_tokens, plan.schedule.warmup_tokens) == (2_000_000, 100_000)
    built = method(plan.method, **plan.options)
    assert (built.period, built.codec, built.outer) == (20, "int8", OuterHeavyBall(0.5))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "nadam"])
def test_the_inner_optimizer_is_the_one_that_it_names(optimizer):
    assert resolved(f"train.optimizer={optimizer}").plan().inner.name == optimizer


def test_the_momentum_of_the_inner_optimizer_is_the_manifests():
    inner = (
        resolved("train.optimizer=sgd", "train.momentum=0.5", "train.nesterov=true").plan().inner
    )
    assert (inner.momentum, inner.nesterov) == (0.5, True)
    assert resolved("train.optimizer=muon").plan().inner.momentum is None


def test_ddp_does_not_train_with_moments_that_it_cannot_send():
    with pytest.raises(Usage, match="cannot send the moments of nadam"):
        resolved("method={name='demo',options={sign=false}}", "train.optimizer=nadam")
    with pytest.raises(Usage, match="cannot send the moments of muon"):
        resolved("method={name='ddp'}", "train.optimizer=muon")
    resolved("method={name='ddp'}", "train.optimizer=sgd", "train.momentum=0.9")


def test_the_default_outer_optimizer_is_the_methods_own():
    plan = demo_manifest("diloco", 2, 50).plan()
    assert plan.options["outer"] == OuterNesterov()


def test_the_demos_tokens_are_those_of_its_peers_steps():
    manifest = demo_manifest("noloco", peers=4, steps=390)
    assert manifest.run.total_tokens == 4 * 390 * manifest.train.batch * manifest.train.seq
    assert manifest.exchange.start_peers == 4


@pytest.mark.parametrize(("steps", "period"), [(20, 4), (60, 6), (100, 10), (390, 10)])
def test_a_short_demo_has_several_rounds(steps, period):
    assert demo_manifest("noloco", peers=4, steps=steps).method.options["period"] == period


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_shortest_demo_has_a_manifest_for_every_method(name):
    assert parse(demo_manifest(name, peers=1, steps=20).canonical())


def test_a_methods_codec_is_one_thing_wherever_it_is_written():
    there = resolved("exchange.codec=int8")
    assert (
        resolved("method.options.codec=int8", "exchange.codec=int8").canonical()
        == there.canonical()
    )
    with pytest.raises(Usage, match=r"exchange\.codec: it differs from method\.options\.codec"):
        resolved("method.options.codec=int8", "exchange.codec=fp16")


# What is wrong is named, with the nearest thing that is possible


@pytest.mark.parametrize(
    ("assignment", "place", "hint"),
    [
        ("train.btach=3", "train.btach", "'batch'"),
        ("tarin.lr=1", "tarin", "'train'"),
        ("method.name=dilico", "method.name: 'dilico'", "'diloco'"),
        ("method.options.perod=3", "'perod'", "'period'"),
        ("model.preset=dmeo", "model.preset: 'dmeo'", "'demo'"),
        ("exchange.codec=itn8", "exchange.codec: codec 'itn8'", "'int8'"),
        ("trust.level=public", "trust.level: 'public'", "choose from trusted"),
        ("train.optimizer=adamww", "train.optimizer: 'adamww'", "'adamw'"),
        ("data.tokenizer=byte", "data.tokenizer: byte cannot be read", "or bytes"),
        ("train.momentum=0.9", "adamw has no momentum", "choose sgd"),
        ("train.momentum=1.0", "train.momentum must be a number < 1.0", "got 1.0"),
        ("train.nesterov=true", "nesterov is for sgd", "momentum=0.9"),
        ("train.batch=x", "train.batch must be a whole number", "got 'x'"),
        ("train.batch=0", "train.batch must be a whole number >= 1", "got 0"),
        ("train.batch=99999999999", "train.batch must be a whole number <=", "got 99999999999"),
        ("train.lr=fast", "train.lr must be a number", "got 'fast'"),
        ("train.lr=inf", "train.lr must be a number <= 100.0", "got inf"),
        ("train.betas=[0.9, 1.0]", "train.betas[1] must be a number < 1.0", ""),
        ("train.betas=[0.9]", "train.betas must be a list of length 2", "got [0.9]"),
        ("train.seq=999", "train.seq: sequences of 999 tokens", "64 or less"),
        ("train.warmup_tokens=100000000", "warm-up of 100000000", "40000"),
        ("model.dim=7", "model: dim 7 cannot be divided into 2 heads", "multiple of 4"),
        ("model.vocab_size=255", "model.vocab_size: 255: the tokenizer", "set it to 256 or more"),
        ("model={dim=16}", "model.layers: it is missing", "give it a value"),
        ("model={layers=2}", "model: dim, heads, kv_heads, ffn_dim are missing", "each"),
        ("model.rope_theta=nan", "rope_theta is nan", "10000"),
        (
            "model=3",
            "model",
            "outside any table is not allowed; move it into one of [run], [model]",
        ),
        ("learning_rate=3", "learning_rate", "write it as train.lr"),
        ("method.options.gamma=5.0", "gamma=5.0", "1.500"),
        ("method.options.period=1.5", "period must be a whole number", "got 1.5"),
        ("method.options.outer.lr=1", "method.options.outer", "does not fit method noloco"),
        ("exchange.codec=topk:64/4096", "biased", "int8"),
        ("exchange.return_codec=bf16", "exchange.return_codec", "noloco has no such option"),
        ("data.corpus=/etc/passwd", "data.corpus: the corpus '/etc/passwd'", ".txt"),
        ("data.corpus=nowhere.txt", "nowhere.txt", "check the path"),
        ("data.sha256=abc", "data.sha256 must be text that matches the pattern", "got 'abc'"),
        ("run.name='a/b'", "run.name must be text that matches the pattern", "got 'a/b'"),
        ("run.seed=-1", "run.seed must be a whole number >= 0", "got -1"),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy(assignment, place, hint):
    with pytest.raises(Usage) as error:
        resolved(assignment)
    assert place in str(error.value)
    assert hint in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{lr=11.0}", "an outer learning rate of 11.0"),
        ("{lr='x'}", "of nesterov, lr must be a number, got 'x'"),
        ("{momentun=0.5}", "did you mean 'momentum'"),
        ("{name='nestrov'}", "did you mean 'nesterov'"),
        ("3", "does not fit"),
    ],
)
def test_a_wrong_outer_optimizer_is_refused(options, message):
    with pytest.raises(Usage, match=message):
        resolved("method.name=diloco", f"method.options.outer={options}")


@pytest.mark.parametrize("assignment", ["train", "=3", "train.=3", ".lr=3", "run.name.x=3"])
def test_an_override_that_names_no_value_is_refused(assignment):
    with pytest.raises(Usage, match=r"--set"):
        resolved("run.name='x'", assignment)


def test_an_override_is_read_as_toml_and_else_as_text():
    table = {}
    for assignment in ("a.b=3", "a.c=1e-3", "a.d=[1, 2]", "e=some words", "f='x=y'", "g=a=b"):
        override(table, assignment)
    assert table == {
        "a": {"b": 3, "c": 1e-3, "d": [1, 2]},
        "e": "some words",
        "f": "x=y",
        "g": "a=b",
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            b"[run]\n[train\n",
            r"run\.toml, line 2: expected '\]' at the end of a table declaration;",
        ),
        (b"x = 'abc", r"run\.toml, at the end: expected \"'\"; correct the TOML there"),
        (b"\xff\xfe", r"run\.toml: it is not UTF-8 text: byte 0 is invalid"),
    ],
)
def test_a_mistake_in_the_toml_is_named_with_its_line(tmp_path, text, sentence):
    path = tmp_path / "run.toml"
    path.write_bytes(text)
    with pytest.raises(Usage, match=sentence):
        load(path)


@pytest.mark.parametrize(
    ("written", "number"),
    [("1B", 10**9), ("'2M'", 2 * 10**6), ("500k", 500_000), ("1e9", 10**9), ("2.5m", 2_500_000)],
)
def test_a_count_of_tokens_may_be_written_short_and_is_spelt_out(written, number):
    manifest = resolved(f"run.total_tokens={written}")
    assert manifest.run.total_tokens == number
    assert manifest.canonical() == resolved(f"run.total_tokens={number}").canonical()


def test_a_strangers_manifest_has_no_short_counts():
    with pytest.raises(RefusedByRun, match=r"run\.total_tokens must be a whole number"):
        parse(tampered("total_tokens = 40000", 'total_tokens = "40k"'))


@pytest.mark.parametrize(
    "text", [b"[run", b"\xff\xfe", b"a = " + b"[" * 5000, b"#" * (MAX_MANIFEST_BYTES + 1)]
)
def test_a_file_that_is_no_manifest_is_refused_with_its_name(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_bytes(text)
    with pytest.raises(Usage, match=r"run\.toml"):
        load(path)


def test_another_protocol_is_refused_before_anything_else_is_looked_at(written, described):
    written.write_text(described + "\n[future]\nx = 1\n")
    with pytest.raises(RefusedByRun, match="update farflock"):
        load(written, (f"run.protocol={PROTOCOL + 1}",))


# Hostile manifests


def tampered(old, new):
    text = resolved().canonical().decode()
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("batch = 2", "batch = 1000000000000"),
        ("layers = 2", "layers = 100000000"),
        ("lr = 0.003", "lr = nan"),
        ("lr = 0.003", "lr = 1979-05-27"),
        ("period = 5", 'period = "five"'),
        ("period = 5", "period = [[[1]]]"),
        ("period = 5", "outer" + ".a" * 5000 + " = 1"),
        ("period = 5", "outer" + ".a" * 400 + " = 1"),
        ('corpus = "shakespeare"', 'corpus = "a\\u0007.txt"'),
        ("period = 5", "perio = 5"),
        ("view_s = 5.0", "view_s = 0.0"),
        ('corpus = "shakespeare"', 'corpus = ["shakespeare"]'),
        ('name = "noloco"', 'name = "__class__"'),
        (f"protocol = {PROTOCOL}", "protocol = 0"),
    ],
)
def test_a_strangers_manifest_that_cannot_run_is_refused_by_the_joiner(old, new):
    with pytest.raises(RefusedByRun):
        parse(tampered(old, new))


def test_a_founder_cannot_name_a_file_without_saying_what_is_in_it():
    text = "\n".join(
        line
        for line in resolved().canonical().decode().splitlines()
        if not line.startswith("sha256")
    )
    with pytest.raises(RefusedByRun, match="sha256"):
        parse(text.replace('"shakespeare"', '"/srv/diary.txt"'))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_at_all_are_a_manifest_or_are_refused(raw):
    with pytest.raises(FarflockError):
        parse(raw)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_change_of_a_manifest_is_another_one_or_is_refused(data):
    text = resolved().canonical()
    place = data.draw(st.integers(0, len(text) - 1))
    changed = text[:place] + data.draw(st.binary(max_size=3)) + text[place + 1 :]
    try:
        manifest = parse(changed)
    except RefusedByRun:
        return
    assert parse(manifest.canonical()) == manifest
    assert manifest.plan()


# The head


@pytest.fixture
def head():
    manifest = resolved()
    return Head(
        manifest.run_id(IDENTITY.peer),
        IDENTITY.peer,
        bytes(range(32)),
        len(manifest.canonical()),
        3,
    )


def test_a_head_comes_back_from_its_sealed_form(head):
    blob = seal_head(IDENTITY, head)
    assert unseal_head(blob) == head
    assert len(blob) <= MAX_HEAD_BYTES


def test_the_largest_head_fits_its_limit():
    largest = Head(
        "f" * 64, IDENTITY.peer, bytes(32), 2**20, 2**31, 2**31, bytes(32), MAX_LIST_BYTES
    )
    assert len(seal_head(IDENTITY, largest)) <= MAX_HEAD_BYTES


def test_only_the_founder_signs_a_head(head):
    stranger = Identity.from_seed(bytes([1] * 32))
    with pytest.raises(BadHead, match="cannot sign"):
        seal_head(stranger, head)
    forged = stranger.sign(b"head", seal_head(IDENTITY, head)[64:]) + seal_head(IDENTITY, head)[64:]
    with pytest.raises(BadHead, match="not signed"):
        unseal_head(forged)


def test_a_signature_of_another_kind_is_no_signature_of_a_head(head):
    body = seal_head(IDENTITY, head)[64:]
    with pytest.raises(BadHead, match="not signed"):
        unseal_head(IDENTITY.sign(b"record", body) + body)


def test_every_changed_byte_and_every_cut_of_a_head_is_found(head):
    blob = seal_head(IDENTITY, head)
    for place in range(len(blob)):
        with pytest.raises(BadHead):
            unseal_head(blob[:place] + bytes([blob[place] ^ 1]) + blob[place + 1 :])
        with pytest.raises(BadHead):
            unseal_head(blob[:place])
    with pytest.raises(BadHead):
        unseal_head(blob + b"\x00")


def test_a_head_without_a_protocol_is_of_this_one_and_one_with_more_fields_is_still_read(head):
    *fields, protocol, listed, size = msgspec.structs.astuple(head)
    assert protocol == PROTOCOL
    for shown in (fields, [*fields, PROTOCOL, listed, size, "and more"]):
        body = msgspec.msgpack.encode(shown)
        assert unseal_head(IDENTITY.sign(b"head", body) + body) == head


def test_another_protocol_is_refused_with_both_numbers():
    require_same_protocol(PROTOCOL)
    with pytest.raises(
        RefusedByRun,
        match=f"another protocol: it speaks version {PROTOCOL + 1}, "
        f"this program version {PROTOCOL};",
    ):
        require_same_protocol(PROTOCOL + 1)
    with pytest.raises(RefusedByRun, match="use the version of farflock that made it"):
        require_same_protocol(PROTOCOL - 1)


@given(st.binary(max_size=600))
def test_any_bytes_at_all_are_no_head(raw):
    with pytest.raises(BadHead):
        unseal_head(raw)


@pytest.mark.parametrize(
    ("field", "value"), [("size", 0), ("size", 2**20 + 1), ("digest", b"short"), ("sequence", -1)]
)
def test_a_head_that_others_would_refuse_is_not_signed(head, field, value):
    with pytest.raises(BadHead, match="not a head"):
        seal_head(IDENTITY, msgspec.structs.replace(head, **{field: value}))


def test_an_outer_optimizer_that_a_method_chose_itself_keeps_its_numbers():
    assert demo_manifest("streaming", 4, 100).method.options["outer"] == {
        "name": "nesterov",
        "lr": 0.4,
        "momentum": 0.9,
    }
