"""The pages of docs/methods/ say what the code says: every method, option, default and stream."""

import dataclasses
import math
import re
import tomllib
from pathlib import Path

import pytest

from farflock.compression.catalog import codec
from farflock.node.run.manifest import resolve
from farflock.node.run.sections import OUTERS
from farflock.node.simulate.chaos_methods import CountingReplica
from farflock.optimizers.catalog import METHODS, PRESETS
from farflock.optimizers.method import All, RandomGroups

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "methods"
PEERS = 4
SIZES = {f"layers.{number}.weight": 16 * 4096 for number in range(4)}
LAYER = "layers.0.weight"
GROUPS = {All: "all", RandomGroups: "a pair"}
SECTIONS = [
    "Idea",
    "Equations",
    "Options",
    "What a peer sends",
    "When to use it",
    "When not",
    "Notes",
    "Paper",
    "Recipes",
]


def page(name):
    return (FOLDER / f"{name}.md").read_text()


def section(name, title):
    return page(name).partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(text):
    """The cells of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def quoted(cell):
    return re.fullmatch(r"`(.+)`", cell)[1]


def value_of(written):
    """A default as a page writes it: TOML, `none` where the code has None."""
    if written == "none":
        return None
    value = tomllib.loads(f"value = {written}")["value"]
    if isinstance(value, dict):
        return OUTERS[value.pop("name")](**value)
    return value


def options_of(method):
    """Options and defaults of a method's class."""
    return {
        field.name: field.default
        if field.default is not dataclasses.MISSING
        else field.default_factory()
        for field in dataclasses.fields(method)
        if not field.name.startswith("_")
    }


def test_every_method_has_a_page_and_every_page_a_method():
    assert {path.stem for path in FOLDER.glob("*.md")} == {*METHODS, "index"}


def test_the_index_lists_each_method_with_the_equality_of_its_class():
    listed = re.findall(r"^\| \[([\w-]+)\]\((.+?)\.md\) \|.+\| ([\w-]+) \|$", page("index"), re.M)
    assert {name: equality for name, _, equality in listed} == {
        name: method.equality for name, method in METHODS.items()
    }
    assert all(name == target for name, target, _ in listed)


def test_the_example_of_the_index_is_a_manifest():
    (example,) = re.findall(r"```toml\n(.*?)```", page("index"), re.S)
    made = resolve(tomllib.loads(example))
    assert made.method.name == "diloco"
    assert made.exchange.codec == "int8"


@pytest.mark.parametrize("name", METHODS)
def test_a_page_names_its_module_and_has_all_sections(name):
    module = METHODS[name].__module__.removeprefix("farflock.").replace(".", "/")
    assert f"`{name}`. Code: `{module}.py`. Equality: `{METHODS[name].equality}`." in " ".join(
        page(name).split()
    )
    titles = re.findall(r"^## (.+)$", page(name), re.M)
    assert titles == (SECTIONS + ["Presets"] * (name == "lean"))


@pytest.mark.parametrize("name", METHODS)
def test_a_page_has_each_option_of_its_method_with_its_default_and_no_other(name):
    listed = [(quoted(cells[0]), cells[1]) for cells in rows(section(name, "Options"))]
    assert {option: value_of(quoted(default)) for option, default in listed} == options_of(
        METHODS[name]
    )
    assert len({option for option, _ in listed}) == len(listed)


@pytest.mark.parametrize("name", METHODS)
def test_a_page_has_each_stream_of_its_method_with_its_kind_and_the_formula_of_that_kind(name):
    method = METHODS[name]()
    streams = method.streams(CountingReplica(0, SIZES, moments=name == "desloc"))
    expected = {
        (re.sub(r"\.\d+$", ".P", one.key.stream), f"{one.kind} of {GROUPS[type(one.group)]}")
        for one in streams
    }
    listed = rows(section(name, "What a peer sends"))
    assert {(quoted(stream), kind) for stream, kind, _, _ in listed} == expected
    begins = {"mean of all": "(M-1)/M · ", "gather of all": "(M-1) · ", "mean of a pair": "codec("}
    assert all(formula.startswith(begins[kind]) for _, kind, _, formula in listed)


@pytest.mark.parametrize("name", METHODS)
def test_formulas_and_times_name_options_that_the_method_has(name):
    for _, _, often, formula in rows(section(name, "What a peer sends")):
        named = {*re.findall(r"`(\w+)`", often), *re.findall(r"(\w*codec)\(", formula)}
        assert named <= options_of(METHODS[name]).keys()


def codecs_of_fixed_length(name):
    """Options under which the size of what is sent is proportional to the number of values."""
    usual = {"codec": "fp16", "return_codec": "bf16", "moment_codec": "bf16", "mask_codec": "fp16"}
    options = options_of(METHODS[name])
    return {
        option: value
        for option, value in usual.items()
        if option in options and not str(options[option]).startswith("topk")
    }


def sent(exchange):
    """The bytes of values that a peer sends in a round of this stream, as tests/sim/test_bytes.py
    counts them, without the four bytes before each tensor."""

    def size(name):
        return sum(codec(name).max_bytes(x.numel()) for x in exchange.tensors.values())

    if isinstance(exchange.group, RandomGroups):
        return size(exchange.codec)
    if exchange.kind == "gather":
        return (PEERS - 1) * size(exchange.codec)
    return (PEERS - 1) / PEERS * (size(exchange.codec) + size(exchange.return_codec))


@pytest.mark.parametrize("name", METHODS)
def test_the_formulas_give_the_bytes_of_the_streams(name):
    method = METHODS[name](**codecs_of_fixed_length(name))
    streams = method.streams(CountingReplica(0, SIZES, moments=name == "desloc"))
    values = {option: getattr(method, option) for option in options_of(METHODS[name])}
    known = {"M": PEERS, "P": sum(SIZES.values()), "P_p": SIZES[LAYER], "L": len(SIZES)}
    known["ceil"] = math.ceil
    known |= {"fp32": codec("fp32").max_bytes} | {
        option: codec(value).max_bytes if option.endswith("codec") else value
        for option, value in values.items()
    }
    formulas = {quoted(row[0]): row[3] for row in rows(section(name, "What a peer sends"))}
    for one in streams:
        written = formulas[re.sub(r"\.\d+$", ".P", one.key.stream)]
        formula = re.split(r", (?:where|or) ", written)[0].replace("·", "*")
        assert eval(formula, {"__builtins__": {}}, known) == sent(one), written


@pytest.mark.parametrize("name", METHODS)
def test_a_page_lists_the_recipes_that_run_its_method_with_their_verdicts(name):
    table = (ROOT / "docs" / "reproductions.md").read_text()
    verdicts = dict(re.findall(r"^\| \[([\w-]+)\]\(#.+?\) \| cpu \| (.+?) \|$", table, re.M))
    expected = {}
    for path in (ROOT / "experiments" / "recipes").glob("*.toml"):
        recipe = tomllib.loads(path.read_text())
        if recipe["method"] == name:
            expected[path.stem] = ("its subject", verdicts[path.stem])
        elif any(arm.get("method") == name for arm in recipe.get("arms", {}).values()):
            expected[path.stem] = ("an arm", verdicts[path.stem])
    listed = {}
    for link, role, _, verdict in rows(section(name, "Recipes")):
        recipe = re.fullmatch(r"\[(.+)\]\(\.\./reproductions\.md#\1-cpu\)", link)[1]
        listed[recipe] = (role, verdict)
    assert listed == expected


def test_presets_are_on_the_page_of_their_method_with_their_options():
    for preset, (name, options) in PRESETS.items():
        (cells,) = [one for one in rows(section(name, "Presets")) if quoted(one[0]) == preset]
        pairs = [quoted(pair).split(" = ") for pair in cells[1].split(", ")]
        assert {option: value_of(value) for option, value in pairs} == options


def test_links_between_pages_lead_somewhere():
    for path in FOLDER.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+\.md)[^)]*\)", path.read_text()):
            assert (FOLDER / target).exists(), f"{path.name}: {target}"
