"""A setting that cannot run is refused, with a reason, before any file, process or port is
opened."""

import inspect
import socket
import tempfile
import time

import psutil
import pytest
import torch
from torch import nn

import farflock
from farflock.node.cli import main as cli
from farflock.node.errors import Failure, Usage
from farflock.node.library.swarm_optimizer import SwarmOptimizer
from farflock.node.run.fit import SHARED_MOMENTS, moments_of, require_inner
from farflock.node.run.invite import Invite, founder_of, mint
from farflock.node.run.manifest import parse, resolve, simulated_default
from farflock.node.run.split import nearest_divisor
from farflock.optimizers.catalog import METHODS, method, options_of
from farflock.optimizers.parts.corrections import TREND, Trend
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.trial_options import trial_of
from farflock.swarm.contact import Contact

TALKING = [
    name for name in sorted(METHODS) if any(option.endswith("codec") for option in options_of(name))
]
UNBIASED_ONLY = [name for name in TALKING if not trial_of(METHODS[name]).biased]

FOUNDER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
INVITE = mint(
    Invite(
        "ab" * 16,
        founder_of(FOUNDER),
        (Contact(FOUNDER, bytes(32), "127.0.0.1", 9, 9, 9),),
        "a run",
        int(time.time() + 3600),
    )
)
PIPELINE = ["pipeline.stages=2", "model.tied=false", "method.name=ddp"]

# assignments to `farflock sim`'s manifest, what the refusal says, what it offers instead
IMPOSSIBLE = [
    (["method.name=dilocko"], "method.name: 'dilocko' is not known", "'diloco'"),
    (["method.name=[1]"], "method.name: '[1]' is not known", "choose from"),
    (["method.name=''"], "method.name: '' is not known", "choose from"),
    (["model.preset={}"], "model.preset: '{}' is not known", "choose from"),
    (
        ["model={layers=2}"],
        "model: dim, heads, kv_heads, ffn_dim are missing",
        "give each of them a value",
    ),
    (["method=3"], "method: a key outside any table is not allowed", "model"),
    (["method.options.period=0"], "a period of 0 steps is out of range", "1 or more"),
    (
        ["method.options.period=99999999999999999999"],
        "method.options.period: the number",
        "smaller",
    ),
    (["method.options.gamma=1.5"], "gamma=1.5 lies outside (0, 1.500)", "lower gamma or alpha"),
    (
        ["method.options.alpha=0.9", "method.options.gamma=0.5"],
        "outside (0, 0.380)",
        "lower gamma or alpha",
    ),
    (["method.options.beta=1e300"], "beta in (0, 10]", "0.7"),
    (["method.name=diloco", "exchange.codec='topk:64/4096'"], "biased", "feedback=0.9"),
    (
        ["method.name=diloco", "exchange.return_codec='sign'"],
        "return codec sign is biased",
        "bf16 or fp32",
    ),
    (
        ["method.name=async", "method.options.enough=2"],
        "wait for 2 contributions, and exchange.start_peers is 1",
        "1 or fewer",
    ),
    (
        ["method.name=async", "method.options.enough=-1"],
        "enough=-1 arrivals is out of range",
        "1 or more",
    ),
    (
        ["method.name=async", "method.options.c=0.1"],
        "needs a buffer of known size",
        "number of workers",
    ),
    (
        ["method.name=streaming", "method.options.fragments=5"],
        "the model's 2 layers cannot be divided into 5",
        "choose 2",
    ),
    (
        ["method.name=streaming", "model.layers=6", "method.options.fragments=4"],
        "the model's 6 layers cannot be divided",
        "choose 3",
    ),
    (["method.name=streaming", "method.options.fragments=0"], "0 fragments do not fit", "1 to 5"),
    (["method.name=streaming", "method.options.overlap=4"], "an overlap of 4 steps", "0 to 2"),
    (
        ["method.name=demo", "train.optimizer=adamw"],
        "its step is rate · sign(q), and adamw",
        "sgd without momentum",
    ),
    (
        ["method.name=demo", "train.momentum=0.9"],
        "its step is rate · sign(q), and sgd",
        "set sign to false",
    ),
    (
        ["method.name=flexdemo", "train.optimizer=muon"],
        "its step is rate · sign(q), and muon",
        "sgd",
    ),
    (
        ["method.name=flexdemo", "train.clip=1.0"],
        "train.clip: 1 would shorten flexdemo's sign(q)",
        "set it to 0",
    ),
    (
        ["method.name=demo", "exchange.codec='topk:64/512'"],
        "chooses among 512 values",
        "topk:32/4096",
    ),
    (
        ["method.name=desloc", "train.optimizer=sgd"],
        "averages exp_avg and exp_avg_sq, and sgd",
        "adamw",
    ),
    (
        ["method.name=lean", "train.optimizer=sgd"],
        "corrects exp_avg with exp_avg_sq",
        "correction to 0",
    ),
    (["method.name=best-10"], "method.name: 'best-10' is not known", "did you mean 'best-100'"),
    (
        ["method.name=desloc", "train.optimizer=muon", "method.options.exp_avg_sq_period=0"],
        "exp_avg,",
        "_period to 0",
    ),
    (
        ["method.name=desloc", "method.options.exp_avg_period=7"],
        "not a multiple of the period 5",
        "choose 5",
    ),
    (["method.name=ddp", "train.optimizer=muon"], "cannot send the moments of muon", "adamw"),
    (
        ["method.name=sparta-diloco", "method.options.mask_period=3"],
        "not a multiple of mask_period=3",
        "choose 6",
    ),
    (
        ["method.name=edit", "method.options.round_s=1e-300"],
        "round_s=1e-300 is out of range",
        "0.001 s or more",
    ),
    (
        ["method.name=delayed", "method.options.eager_mix=0.5", "method.options.mode=naive"],
        "mode naive",
        "mode eager",
    ),
    (
        ["method.name=delayed", "method.options.delay=2"],
        "delay: 2 is not known",
        "choose from 0, 1",
    ),
    (["method.name=sparta", "method.options.selector=rnadom"], "'rnadom' is not known", "'random'"),
    (
        ["method.name=local", "exchange.codec=int8"],
        "exchange.codec: method local has no such option",
        "leave it out",
    ),
    (["pipeline.stages=2"], "'tied model'", "set model.tied to false"),
    (
        ["pipeline.stages=3", "model.tied=false"],
        "'all layers': 2 layers can be cut into 1 to 2 stages",
        "choose 2",
    ),
    (
        ["pipeline.stages=2", "model.tied=false", "method.name=async"],
        "'rounds in step': method async",
        "choose ddp",
    ),
    ([*PIPELINE, "pipeline.codec=aqsgd4"], "'pinned routes': codec aqsgd4", "such as int4"),
    (
        [*PIPELINE, "pipeline.codec=aqsgd8", "pipeline.policy=fixed"],
        "'recurring samples': codec aqsgd8",
        "or choose int8",
    ),
    ([*PIPELINE, "train.samples=0"], "train.samples", ">= 1"),
    (
        [*PIPELINE, "pipeline.policy=swap"],
        "'swap of unequal stages': only 0 of 2 stages",
        "4 or at least 6 stages",
    ),
    ([*PIPELINE, "pipeline.polcy=swap"], "pipeline.polcy: there is no such key", "'policy'"),
]


@pytest.mark.parametrize(
    ("assignments", "says", "offers"), IMPOSSIBLE, ids=lambda given: str(given)[:60]
)
def test_what_is_impossible_is_refused_with_what_is_possible(assignments, says, offers):
    with pytest.raises(Usage) as refused:
        simulated_default(assignments)
    assert says in str(refused.value)
    assert offers in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", UNBIASED_ONLY)
def test_no_method_without_feedback_averages_what_a_biased_codec_leaves(name):
    for option in (option for option in options_of(name) if option.endswith("codec")):
        with pytest.raises(ValueError, match=r"biased.*(choose|feedback)"):
            method(name, **{option: "topk:64/4096"})


@pytest.mark.parametrize("name", sorted(set(TALKING) - set(UNBIASED_ONLY)))
def test_a_method_that_says_so_takes_a_biased_codec(name):
    assert method(name, codec="topk:64/4096")


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_number_of_a_method_has_bounds_that_its_manifest_knows(name):
    impossible = {
        "period": 0,
        "deadline_s": 0.0,
        "outer": {"lr": -1.0},
        "codec": "fp17",
        "return_codec": "fp17",
    }
    for option in impossible.keys() & options_of(name).keys():
        with pytest.raises(Usage):
            resolve({"method": {"name": name, "options": {option: impossible[option]}}})


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_runs_with_its_defaults_on_every_preset_and_in_the_simulator(name):
    for preset in ("tiny", "demo", "10m"):
        made = resolve({"model": {"preset": preset}, "method": {"name": name}})
        assert parse(made.canonical()) == made
    assert simulated_default([f"method.name={name}"]).method.name == name


def test_the_default_number_of_fragments_divides_the_layers():
    def fragments(layers):
        made = resolve(
            {"model": {"preset": "demo", "layers": layers}, "method": {"name": "streaming"}}
        )
        return made.method.options["fragments"]

    assert [fragments(layers) for layers in (1, 2, 3, 4, 6, 7, 12)] == [1, 2, 3, 4, 3, 1, 4]
    assert [nearest_divisor(12, wished) for wished in (1, 5, 8, 10, 100)] == [1, 4, 6, 12, 12]


@pytest.mark.parametrize("name", ["demo", "flexdemo"])
def test_a_method_whose_step_is_a_sign_has_plain_sgd_unless_its_founder_wants_no_sign(name):
    plain = resolve({"method": {"name": name}}).train
    assert (plain.optimizer, plain.clip) == ("sgd", 0.0)
    other = resolve({"method": {"name": name, "options": {"sign": False}}}).train
    assert (other.optimizer, other.clip) == ("adamw", 1.0)


def test_as_many_arrivals_as_members_at_the_start_may_close_a_round():
    table = {"method": {"name": "async", "options": {"enough": 3}}, "exchange": {"start_peers": 3}}
    assert resolve(table).method.options["enough"] == 3


# moments


@pytest.mark.parametrize("name", sorted(SHARED_MOMENTS))
def test_a_method_that_shares_moments_takes_optimizers_whose_moments_it_sends(name):
    options = {"sign": False} if "sign" in options_of(name) else {}
    model, made = nn.Linear(2, 2), method(name, **options)
    require_inner(name, made, InnerConfig("adamw").build(model))
    require_inner(name, made, InnerConfig("sgd").build(model))
    for unknown in (torch.optim.RMSprop, torch.optim.Adagrad):
        with pytest.raises(Usage, match="cannot send the moments"):
            require_inner(name, made, unknown(model.parameters()))
    with pytest.raises(Usage, match="amsgrad"):
        require_inner(name, made, torch.optim.AdamW(model.parameters(), amsgrad=True))


def test_what_is_said_to_be_shared_is_in_the_snapshot(vectors_of_moments):
    for name, moments in SHARED_MOMENTS.items():
        assert {what for what in moments if vectors_of_moments(name, what)} == moments


@pytest.fixture
def vectors_of_moments():
    """A function: whether a moment of the inner optimizer is in the method's snapshot."""

    def found(name, what):
        from farflock.node.model.replica import PlainReplica

        model = nn.Linear(2, 2)
        if what in ("momentum_buffer", TREND):
            inner = torch.optim.SGD(model.parameters(), 0.1, 0.9)
            Trend(inner)
        else:
            kind = torch.optim.NAdam if what == "mu_product" else torch.optim.AdamW
            inner = kind(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        inner.step()
        state = method(name).snapshot(PlainReplica(model, inner))
        return f"{what}.weight" in state

    return found


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "nadam"])
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_what_is_known_of_an_optimizer_without_building_it_is_what_it_keeps(name, momentum):
    if name in ("adamw", "nadam") and momentum:
        pytest.skip(f"{name} has betas in place of a momentum")
    model, config = nn.Linear(2, 2), InnerConfig(name, momentum=momentum)
    built = config.build(model)
    assert moments_of(built) == moments_of(config)
    model(torch.ones(1, 2)).sum().backward()
    built.step()
    kept = [
        frozenset(name for name, x in state.items() if x is not None)
        for state in built.state.values()
    ]
    assert {moments or frozenset() for moments in moments_of(config)} == set(kept or [frozenset()])


# nothing has started


@pytest.fixture
def farflock_command(tmp_path, monkeypatch, capfd):
    """A function that runs a command: (exit code, standard error); only words may be left by it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(*arguments):
        me = psutil.Process()
        before = (
            sorted(tmp_path.rglob("*")),
            me.children(),
            {c.laddr for c in me.net_connections() if c.laddr},
        )
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        after = (
            sorted(tmp_path.rglob("*")),
            me.children(),
            {c.laddr for c in me.net_connections() if c.laddr},
        )
        assert after == before
        return ended.value.code, capfd.readouterr().err

    return run


def commands(folder, assignments):
    """The same impossible run, asked for in each way."""
    sets = [word for assignment in assignments for word in ("--set", assignment)]
    file = folder / "run.toml"
    file.write_text('[model]\npreset = "tiny"\n[train]\nseq = 32\n')
    place = ["--folder", folder / "place"]
    return [
        ["sim", *sets],
        ["sim", "--dry-run", *sets],
        ["run", file, *sets, *place],
        ["run", file, "--dry-run", *sets],
    ]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    "assignments",
    [
        ["method.name=dilocko"],
        ["method.name=streaming", "method.options.fragments=5"],
        ["method.name=async", "method.options.enough=2"],
        ["method.name=demo", "train.optimizer=adamw"],
        ["method.name=async", "pipeline.stages=1"],
    ],
    ids=str,
)
def test_a_command_refuses_with_code_2_and_leaves_no_trace(
    tmp_path, farflock_command, number, assignments
):
    code, said = farflock_command(*commands(tmp_path, assignments)[number])
    assert code == 2
    assert said.startswith(
        ("farflock: method", "farflock: the pipeline breaks the rule 'rounds in step': method")
    )


def test_the_demo_refuses_an_unknown_method_before_it_makes_its_folder(farflock_command, tmp_path):
    code, said = farflock_command("demo", "--method", "dilocko", "--folder", tmp_path / "there")
    assert code == 2
    assert "did you mean 'diloco'?" in said


def in_each_way(folder, *options):
    """Commands that would start something, with these options."""
    file = folder / "run.toml"
    file.write_text('[model]\npreset = "tiny"\n[train]\nseq = 32\n')
    return {
        "run": ["run", file, *options],
        "join": ["join", INVITE, *options],
        "demo": ["demo", *options],
        "demo --pipeline": ["demo", "--pipeline", *options],
        "sim": ["sim", *options],
    }


@pytest.mark.parametrize("way", ["run", "join", "demo", "demo --pipeline", "sim"])
def test_a_device_that_there_is_not_is_refused_in_one_sentence_everywhere(
    tmp_path, farflock_command, way
):
    code, said = farflock_command(*in_each_way(tmp_path, "--device", "nonsense")[way])
    assert code == 2
    assert said.startswith("farflock: --device nonsense: that is not a device's name; choose auto")


@pytest.mark.parametrize("way", ["run", "join", "demo", "demo --pipeline", "sim"])
def test_a_folder_that_cannot_be_made_is_refused_in_one_sentence_everywhere(
    tmp_path, farflock_command, way
):
    (tmp_path / "file").touch()
    there = tmp_path / "file" / "there"
    code, said = farflock_command(*in_each_way(tmp_path, "--folder", there)[way])
    assert code == 1
    assert said.startswith(f"farflock: the folder {there} cannot be created: not a directory; a fi")
    with pytest.raises(Failure, match=f"the folder {there} cannot be created: not a directory"):
        SwarmOptimizer(stack(1), folder=there)


@pytest.fixture
def taken():
    """A port that another program uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.net
@pytest.mark.parametrize("option", ["--port", "--dht-port"])
@pytest.mark.parametrize("way", ["run", "join"])
def test_a_port_in_use_is_refused_in_one_sentence_everywhere(
    tmp_path, farflock_command, taken, way, option
):
    (tmp_path / "node").mkdir()
    options = (option, taken, "--folder", tmp_path / "node")
    code, said = farflock_command(*in_each_way(tmp_path, *options)[way])
    assert code == 1
    assert said.startswith(f"farflock: 127.0.0.1: another program uses port {taken}; stop that")
    named = {option.removeprefix("--").replace("-", "_"): taken}
    with pytest.raises(Failure, match=f"another program uses port {taken}; stop that"):
        SwarmOptimizer(stack(1), invite=INVITE if way == "join" else None, **named)


def test_one_port_for_two_purposes_is_refused():
    with pytest.raises(Usage, match="port 4001: it is named for both links and discovery"):
        SwarmOptimizer(stack(1), port=4001, dht_port=4001)


def test_the_simulator_counts_its_own_peers(farflock_command):
    sets = ["method.name=async", "method.options.enough=3", "exchange.start_peers=3"]
    words = [word for assignment in sets for word in ("--set", assignment)]
    code, said = farflock_command("sim", "--peers", 2, *words)
    assert (code, "--peers is 2" in said) == (2, True)
    assert farflock_command("sim", "--peers", 3, "--dry-run", *words)[0] == 0


# a user's own model


def stack(layers):
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))


def adamw(parameters):
    return torch.optim.AdamW(parameters, amsgrad=True)


class NoDoor:
    """A door that must not be opened."""

    def enter(self, join_request):
        raise AssertionError("something was started")


@pytest.mark.parametrize("invite", [None, NoDoor()], ids=["network", "door"])
@pytest.mark.parametrize(
    ("options", "says", "offers"),
    [
        ({"method": "dilocko"}, "'dilocko' is not known", "'diloco'"),
        (
            {"method": "streaming", "fragments": 4},
            "the model's 6 layers cannot be divided into 4",
            "choose 3",
        ),
        (
            {"method": "streaming", "fragments": 7},
            "the model's 6 layers cannot be divided into 7",
            "choose 6",
        ),
        ({"method": "noloco", "gamma": 2.0}, "gamma=2.0 lies outside", "lower gamma"),
        ({"method": "diloco", "codec": "sign"}, "biased", "feedback=0.9"),
        ({"method": "diloco", "period": 0}, "a period of 0", "1 or more"),
        ({"method": "diloco", "period": float("nan")}, "period: nan", "finite"),
        ({"method": "edit", "temperature": None}, "cannot hold None", "leave it out to get 1.0"),
        ({"method": "async", "enough": 65}, "wait for 65 contributions", "64 or fewer"),
        ({"method": "demo"}, "and AdamW with these settings", "sgd without momentum"),
        (
            {"method": "flexdemo", "sign": False, "inner": adamw},
            "cannot send the moments of AdamW",
            "without amsgrad",
        ),
        ({"method": "ddp", "inner": "muon"}, "cannot send the moments of Muon", "adamw"),
        ({"method": "desloc", "inner": "sgd"}, "SGD does not keep these", "use adamw"),
    ],
)
def test_an_optimizer_that_cannot_work_starts_nothing(invite, options, says, offers, monkeypatch):
    import farflock.node.library.door as network_door

    monkeypatch.setattr(network_door.NetworkEntryPoint, "enter", NoDoor().enter)
    with pytest.raises(Usage) as refused:
        SwarmOptimizer(stack(6), invite=invite, **options)
    assert says in str(refused.value)
    assert offers in str(refused.value)


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"advertise": "203.0.113.7"}, "advertise: '203.0.113.7' is not an address and a port"),
        ({"advertise": ["203.0.113.7:4002", "x"]}, "advertise: 'x' is not an address and a port"),
        ({"up": "5"}, "up: '5' is not a rate; write a number and kbit, mbit or gbit"),
        ({"down": 5e6}, "down: '5000000.0' is not a rate"),
        ({"checkpoint_s": 0}, "checkpoint_s: 0 is not a time from one checkpoint to the next"),
        ({"checkpoint_s": float("nan")}, "checkpoint_s: nan is not a time"),
        ({"hots": "::"}, "method.options of diloco: there is no 'hots'"),
    ],
)
def test_a_wrong_keyword_of_the_own_machine_is_named_before_its_folder_is_made(
    tmp_path, named, says
):
    with pytest.raises(Usage) as refused:
        SwarmOptimizer(stack(1), folder=tmp_path / "mine", **named)
    assert says in str(refused.value)
    assert not (tmp_path / "mine").exists()


def test_a_joiner_s_unknown_method_is_refused_before_it_joins():
    with pytest.raises(Usage, match="'dilocko' is not known; did you mean 'diloco'"):
        SwarmOptimizer(stack(1), "dilocko", INVITE)


def test_a_local_swarm_of_two_never_has_three_arrivals():
    with pytest.raises(Usage, match="wait for 3 contributions from 2 peers; choose 2 or fewer"):
        farflock.local_swarm(2, "async", enough=3)


def test_the_docstring_names_the_inner_optimizers_that_there_are():
    text = inspect.getdoc(SwarmOptimizer)
    assert all(f'"{name}"' in text for name in ("adamw", "sgd", "muon", "nadam"))
