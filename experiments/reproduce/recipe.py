"""A recipe that trains: its arms, sizes for three tiers, and rules that turn losses into a verdict.

Recipes are TOML files, checked strictly before anything runs: a misspelt option that is silently
ignored would give a verdict about another experiment.
"""

from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated, Any, Literal

import msgspec

from farflock.experiments.reproduce.claim import Claim, Entry, Rule, section, sections
from farflock.experiments.reproduce.computation import Computation
from farflock.experiments.reproduce.computation import read as read_computation
from farflock.node.errors import Usage, nearest
from farflock.node.model.llama import PRESETS, ModelConfig
from farflock.node.run.manifest import override
from farflock.node.run.sections import (
    ExchangeSection,
    MethodSection,
    constructor_options,
    require_method,
    tables,
)
from farflock.optimizers.catalog import METHODS, method, unfolded

LINES = ("ddp", "none")  # baselines: part of every recipe that trains, without being named there
METRICS = (
    "loss",
    "perplexity",
    "bytes",
    "tokens",
    "spread",
    "spread_lr",
    "missed",
    "growth",
    "virtual_s",
)

Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_.-]{0,31}$")]
Some = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=100)]
Slowness = Annotated[float, msgspec.Meta(ge=1, le=100)]
Rates = Annotated[list[Rate], msgspec.Meta(min_length=1, max_length=16)]


class Sweep(Entry, frozen=True, kw_only=True):
    """An option whose values give one arm each (`outer.lr` names an option inside a table)."""

    option: str
    values: Annotated[list[float], msgspec.Meta(min_length=2, max_length=16)]


class Arm(Entry, frozen=True, kw_only=True):
    """One arm of the experiment; `peers`, `lr` and `clip` default to the tier's.

    `late` is the share of rounds for which each peer comes too late. `speeds` has one factor per
    peer, by which its steps take longer.
    """

    label: str
    method: str
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    peers: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    lr: Rates | None = None
    optimizer: Literal["adamw", "sgd"] = "adamw"
    clip: Annotated[float, msgspec.Meta(ge=0)] | None = None
    late: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    speeds: Annotated[list[Slowness], msgspec.Meta(max_length=64)] = msgspec.field(
        default_factory=list
    )
    sweep: Sweep | None = None


class Sizes(Entry, frozen=True, kw_only=True):
    """Settings that all arms share in one tier.

    A step of the run takes `batch` sequences of `seq` tokens, shared evenly by the peers. `lr` and
    `warmup` (a share of the steps) are grids, searched for each arm on the first seed. `options`
    overrides an arm's options of the same names. `step_s` is the modelled time of a step.
    """

    model: str | dict[str, Any] = "demo"
    peers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    batch: Some = 8
    seq: Some = 64
    steps: Some
    lr: Rates = msgspec.field(default_factory=lambda: [4e-3])
    warmup: Annotated[list[Share], msgspec.Meta(min_length=1, max_length=8)] = msgspec.field(
        default_factory=lambda: [0.25]
    )
    floor: Share = 0.1
    weight_decay: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.1
    betas: tuple[Share, Share] = (0.9, 0.95)
    clip: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    seeds: Annotated[list[int], msgspec.Meta(min_length=1, max_length=64)]
    points: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 10
    held_out: Annotated[int, msgspec.Meta(ge=2, le=100_000)] = 128
    step_s: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 0.5
    device: Literal["cpu", "gpu"] = "cpu"  # gpu: the best device that a machine has
    options: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def shape(self) -> ModelConfig:
        """The model's configuration."""
        named = PRESETS[self.model] if isinstance(self.model, str) else self.model
        return named if isinstance(named, ModelConfig) else msgspec.convert(named, ModelConfig)


class Recipe(Claim, frozen=True, kw_only=True):
    """A claim and its test: `training`, or `noise` without gradients (noise.py)."""

    experiment: Literal["training", "noise"] = "training"
    arms: dict[Name, Arm]
    verdict: Annotated[list[Rule], msgspec.Meta(min_length=1)]

    def sizes(self, tier: str) -> Sizes:
        """Return a tier's settings; raise `Usage` if there is no such tier or they do not fit."""
        sizes = self.section(tier, Sizes)
        if self.experiment == "training":
            _require_fit(self, sizes, f"{self.name}.toml, tiers.{tier}")
        return sizes

    def needs_gpu(self, tier: str) -> bool:
        """Return whether this tier needs a GPU; raise `Usage` as `sizes` does."""
        return self.sizes(tier).device == "gpu"

    def expanded(self) -> dict[str, Arm]:
        """Return the arms that run; a sweep gives one per value, named NAME@VALUE."""
        return {
            name: arm for base, arm in self.arms.items() for name, arm in swept(base, arm).items()
        }


def swept(name: str, arm: Arm) -> dict[str, Arm]:
    """Return the arm by its name, or one arm for each value of its sweep."""
    if arm.sweep is None:
        return {name: arm}
    made = {}
    for value in arm.sweep.values:
        options = _copied(arm.options)
        override(options, f"{arm.sweep.option}={value!r}")
        label = f"{arm.label}, {arm.sweep.option} {value:g}"
        made[f"{name}@{value:g}"] = msgspec.structs.replace(
            arm, options=options, label=label, sweep=None
        )
    return made


def names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(
        file.name.removesuffix(".toml")
        for file in _folder().iterdir()
        if file.name.endswith(".toml")
    )


def load(name: str) -> Recipe | Computation:
    """Load a recipe by its name; raise `Usage` if there is none or it has a mistake."""
    if name not in names():
        raise Usage(
            f"recipe {name[:64]!r}", "there is no recipe with this name", nearest(name, names())
        )
    text, origin = (_folder() / f"{name}.toml").read_text(), f"{name}.toml"
    return (
        read_computation(name, text) if "computation" in tables(text, origin) else read(name, text)
    )


def read(name: str, text: str) -> Recipe:
    """Parse and check a recipe that trains."""
    table, origin = tables(text, f"{name}.toml"), f"{name}.toml"
    arms = table.get("arms", {})
    if not isinstance(arms, dict) or not all(isinstance(arm, dict) for arm in arms.values()):
        raise Usage(f"{origin}, arms", "each arm must be a table", "write it as [arms.NAME]")
    checked = {
        key: _spelt_out(section(arm, Arm, f"{origin}, arms.{key}")) for key, arm in arms.items()
    }
    judged = sections(table, "verdict", Rule, origin)
    recipe = section({**table, "arms": {}}, Recipe, origin)
    recipe = msgspec.structs.replace(recipe, arms=checked, verdict=judged, name=name)
    _require_arms(recipe, origin)
    for number, rule in enumerate(recipe.verdict, 1):
        _require_rule(recipe, rule, f"{origin}, verdict {number}")
    return recipe


def _spelt_out(arm: Arm) -> Arm:
    """Replace a preset by its method and options, so that equal arms share their runs."""
    base, preset = unfolded(arm.method)
    return msgspec.structs.replace(arm, method=base, options=preset | arm.options)


def missing(recipe: Recipe | Computation) -> list[str]:
    """Return the names of the methods that the arms use and this version lacks."""
    if isinstance(recipe, Computation) or recipe.experiment != "training":
        return []
    return sorted({arm.method for arm in recipe.arms.values()} - set(METHODS))


def built(arm: Arm, options: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the constructor arguments of an arm's method; raise `Usage` if it rejects them."""
    described = MethodSection(arm.method, dict(options))
    require_method(described)
    try:
        arguments = constructor_options(described, ExchangeSection())
        method(arm.method, **arguments)
    except ValueError as error:
        raise Usage(place, str(error), "") from None
    return arguments


def options_of(arm: Arm, sizes: Sizes) -> dict[str, Any]:
    """Return an arm's options, with those that the tier overrides."""
    return arm.options | {
        name: value for name, value in sizes.options.items() if name in arm.options
    }


def _folder() -> Traversable:
    return files("farflock.experiments") / "recipes"


def _require_arms(recipe: Recipe, origin: str) -> None:
    if not recipe.arms:
        raise Usage(origin, "the recipe has no arms", "add a table [arms.NAME]")
    if reserved := sorted(set(LINES) & set(recipe.arms)):
        raise Usage(
            f"{origin}, arms.{reserved[0]}", "every recipe includes this baseline", "leave it out"
        )
    if recipe.experiment == "noise" or missing(recipe):
        return
    for name, arm in recipe.expanded().items():
        built(arm, arm.options, f"{origin}, arms.{name}")
        if arm.late and "period" not in arm.options:
            raise Usage(
                f"{origin}, arms.{name}.late",
                "late peers miss rounds, which come once per period",
                "set options.period too",
            )


def _require_rule(recipe: Recipe, rule: Rule, place: str) -> None:
    known = [*recipe.arms] if rule.kind == "optimum" else [*recipe.expanded(), *LINES]
    for name in rule.arms:
        if name not in known:
            raise Usage(place, f"there is no arm {name[:64]!r}", nearest(name, known))
        if rule.kind == "optimum" and recipe.arms[name].sweep is None:
            raise Usage(
                place,
                f"arm {name} has no sweep, so there is no optimum to compare",
                "give it a sweep, or use another kind",
            )
    if rule.metric not in METRICS:
        raise Usage(
            f"{place}, metric",
            f"{rule.metric[:64]!r} is not known",
            nearest(rule.metric, METRICS),
        )
    rule.require_sound(place)


def _require_fit(recipe: Recipe, sizes: Sizes, place: str) -> None:
    """Raise `Usage` if the sizes do not fit the model or the number of peers."""
    if isinstance(sizes.model, str) and sizes.model not in PRESETS:
        raise Usage(
            f"{place}: model", f"{sizes.model!r} is not known", nearest(sizes.model, PRESETS)
        )
    try:
        context = sizes.shape.context
    except (msgspec.ValidationError, ValueError) as error:
        raise Usage(f"{place}: model", str(error), "correct its sizes") from None
    if sizes.seq > context:
        raise Usage(
            f"{place}: seq",
            f"{sizes.seq} tokens do not fit the model's context of {context}",
            "give a smaller `seq`, or a model with more context",
        )
    for name, peers in [
        ("all arms", sizes.peers),
        *((name, arm.peers) for name, arm in recipe.arms.items() if arm.peers),
    ]:
        if sizes.batch % peers:
            why = (
                f"{sizes.batch} sequences per step cannot be shared evenly by the {peers} peers "
                f"of {name}"
            )
            raise Usage(f"{place}: batch", why, f"choose a multiple of {peers}")
    for name, arm in recipe.arms.items():
        if arm.speeds and len(arm.speeds) != (arm.peers or sizes.peers):
            why = f"arm {name} has {len(arm.speeds)} speeds for {arm.peers or sizes.peers} peers"
            raise Usage(f"{place}: speeds", why, "give one for each peer")


def _copied(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _copied(value) if isinstance(value, dict) else value for name, value in table.items()
    }


def explanation(name: str) -> str:
    """Return a recipe's page: the question, the paper's claim, and what would reproduce it."""
    return (_folder() / f"{name}.md").read_text()
