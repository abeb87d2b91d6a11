"""The keywords of `SwarmOptimizer` beside its own parameters, for type checkers.

Those of a run stand beside a method's name. What is right together is the method's own affair: they
are all options of all methods, with the types of their fields, and those of exchanges.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from farflock.compression.codec import Codec


class CommonOptions(TypedDict, total=False):
    """Options of a run that `SwarmOptimizer` and `local_swarm` take alike."""

    # of exchanges, and of what peers have in common
    codec: str | Codec
    return_codec: str | Codec
    deadline_s: float
    frozen: str | None
    buffers: Literal["average"] | None
    # of methods
    alpha: float
    beta: float
    buffer: int | None
    c: float
    cap: float
    check_rounds: int
    chunk: int
    clip: float | None
    correction: float
    decay: float
    delay: int
    denominator: Literal["participants", "selectors"]
    drop_above: int
    dylu: bool
    eager_mix: float | None
    enough: int
    exp_avg_period: int | None
    exp_avg_sq_period: int | None
    feedback: float | None
    fragments: int
    gamma: float
    hinge_free: int
    hinge_slope: float
    mask_codec: str
    mask_period: int
    min_steps: int
    mix: float
    mode: Literal["naive", "keep_pending", "eager"]
    moment_codec: str
    momentum: float
    one_in: int
    outer: Mapping[str, object]
    outer_lr: float
    outer_momentum: float
    overlap: int
    pattern: Literal["strided", "sequential"]
    penalty: bool
    period: int
    rate: float
    refresh: int
    relative: bool
    replicator: Literal["striding", "slicing", "random", "full"]
    round_s: float | None
    selector: Literal["random", "partition"]
    sign: bool
    slack: int | None
    staleness: Literal["none", "polynomial", "hinge", "drop"]
    step_ratio: float
    temperature: float | None
    threshold: float | None
    tolerance: float
    warmup: int
    weights: Literal["uniform", "steps", "tokens"]


class RunOptions(CommonOptions, total=False):
    """Options of a run as `SwarmOptimizer` takes them."""

    view_s: float


class OwnOptions(TypedDict, total=False):
    """Keywords of `SwarmOptimizer` that say where and how its own machine takes part. They are none
    of the run's, so that each peer may give others."""

    advertise: str | Sequence[str]
    checkpoint_s: float
    client_mode: bool
    dht_port: int
    down: str | None
    folder: Path | None
    host: str
    outer_state: Literal["host", "disk", "device"]
    port: int
    up: str | None


class SwarmOptions(RunOptions, OwnOptions, total=False):
    """All keywords that `SwarmOptimizer` takes beside its own parameters."""


def split_options(options: SwarmOptions) -> tuple[OwnOptions, RunOptions]:
    """Return the keywords of the own machine, and the rest: those of the run, and unknown ones."""
    own = {name: value for name, value in options.items() if name in OwnOptions.__optional_keys__}
    run = {name: value for name, value in options.items() if name not in own}
    return cast(OwnOptions, own), cast(RunOptions, run)


class LocalOptions(CommonOptions, total=False):
    """Keywords that `local_swarm` passes on to each `SwarmOptimizer`."""

    inner: Any
    lr: float | None
    run: str | None
    tokens_per_step: int
    on_jump: Literal["refuse", "adopt", "keep"] | None
