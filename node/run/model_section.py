"""`[model]`: the model's shape, and what its weights begin as; or what a user's own model is.

A founder may name a folder in Hugging Face's form (`from`) in place of sizes. What others get is
the hash of the weights: they download the weights themselves from the swarm, as its state.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from farflock.compression.activation_catalog import subspace_terms
from farflock.node.errors import Failure, Usage
from farflock.node.model.hf_config import BadModelFolder, config_in
from farflock.node.model.llama import PRESETS, ModelConfig
from farflock.node.model.weights_folder import LICENCE, WeightsFolder, licence_in
from farflock.node.run.sections import PlainText, Section, require_name
from farflock.node.run.sizes import completed
from farflock.node.run.terms import RunPlan

FROM = "from"  # a founder's key, which no resolved manifest has
_REMEDY = "name a folder that transformers' save_pretrained wrote, as in from = 'FOLDER'"
_FREE = ("context", "tied")  # may differ from a folder's configuration

Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
Licence = Annotated[str, msgspec.Meta(pattern=rf"^{LICENCE}$")]


class ModelSection(ModelConfig, frozen=True, kw_only=True):
    """[model]: the shape of the model, and the hash and the licence of the `weights` that the run
    begins with (node/model/weights_folder.py); without a hash they are drawn from the run's seed.

    A founder writes `from`, a folder of a Hugging Face model, in place of sizes and hash: relative
    to the manifest's own folder. Architectures differ inside attention only: `qwen2` adds biases to
    queries, keys and values, and `qwen3` normalises queries and keys."""

    weights: Hash | None = None
    licence: Licence | None = None

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)

    @property
    def shape(self) -> ModelConfig:
        """The shape alone."""
        return ModelConfig(**{name: getattr(self, name) for name in ModelConfig.__struct_fields__})


class UserModel(Section, frozen=True):
    """[model] of a run that trains a user's own model: the number of trained tensors and of their
    values, a hash of everything that all peers must have in common, and the class of the inner
    optimizer. `frozen` is the name of what is frozen, if peers may have other tensors there;
    `buffers` says that those are averaged too. No other keys are allowed."""

    tensors: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    numbers: Annotated[int, msgspec.Meta(ge=1, le=2**60)]
    sha256: Hash
    inner: PlainText
    frozen: PlainText | None = None
    buffers: Literal["average"] | None = None


ModelKind = type[ModelSection] | type[UserModel]


def folder_of(table: Mapping[str, Any]) -> Path | None:
    """Return the folder that a founder's `[model]` table names, if any; raise `Usage` if that is
    not a path."""
    named = table.get(FROM)
    if named is None:
        return None
    if not isinstance(named, str) or not named:
        raise Usage("model.from", f"{named!r:.80} is not a path", _REMEDY)
    return Path(named).expanduser()


def take_sizes(table: dict[str, Any]) -> Path | None:
    """Replace a founder's folder by the sizes that its config.json says, and return it; None if the
    table names none. Sizes that are given too have to agree: but a context may be shorter, and a
    tied model may get a head of its own."""
    given = table.get("model")
    folder = folder_of(given) if isinstance(given, dict) else None
    if not isinstance(given, dict) or folder is None:
        return None
    if "preset" in given:
        raise Usage("model.preset", "model.from has the sizes already", "leave out one of them")
    context = given.get("context")
    try:
        config = config_in(folder, context if isinstance(context, int) else None)
    except BadModelFolder as error:
        raise Usage("model.from", str(error), "") from None
    said = msgspec.to_builtins(config)
    for name, value in given.items():
        if name in said and name not in _FREE and value != said[name]:
            raise Usage(
                f"model.{name}: {value!r:.80}",
                f"the model in {folder} has {said[name]}",
                f"leave out model.{name}",
            )
    if given.get("tied") is True and not config.tied:
        why = f"the model in {folder} has a head of its own"
        raise Usage("model.tied", why, "leave out model.tied")
    table["model"] = said | {name: value for name, value in given.items() if name != FROM}
    return folder


def begun(folder: Path, model: ModelSection) -> ModelSection:
    """Return the section with the hash of a folder's weights, and their licence if none is given;
    raise `Usage` if they are not those of such a model, or of the hash that is given."""
    try:
        found = WeightsFolder(folder, model.shape).hash
    except BadModelFolder as error:
        raise Usage("model.from", str(error), "") from None
    if model.weights not in (None, found):
        raise Usage(
            "model.weights",
            f"the weights in {folder} have another hash, {found}",
            "leave it out, or name the folder with these weights",
        )
    licence = model.licence or licence_in(folder)
    return msgspec.structs.replace(model, weights=found, licence=licence)


def fill_model(table: dict[str, Any], seq: object) -> None:
    """Replace a preset by its sizes, or fill in those that are left out; a size that is also given
    overrides the preset's. `seq` is the length of a sequence of training."""
    model = dict(table.get("model", {}))
    named = any(size in model for size in ("dim", "layers", "heads"))
    preset = model.pop("preset", None if named else "demo")
    if preset is not None:
        require_name("model.preset", preset, PRESETS)
        model = msgspec.to_builtins(PRESETS[preset]) | model
    else:
        model = completed(model, seq)
    table["model"] = model


def require_codec(codec: str, model: ModelSection) -> None:
    """Raise `Usage` if a pipeline with this codec cannot start from a folder's weights."""
    if model.weights is not None and subspace_terms(codec) is not None:
        why = f"the codec {codec} keeps weights in a random subspace, where trained ones are not"
        remedy = "choose another pipeline.codec, or start from the run's seed"
        raise Usage("model.weights", why, remedy)


def first_weights(plan: RunPlan, folder: Path | None) -> WeightsFolder | None:
    """Return what a founder's model begins with: the weights of this folder, or None if the run
    draws them from its seed. Raise `Failure` if the run starts from other weights than are here."""
    if plan.weights is None:
        return None
    if folder is None:
        raise Failure(
            "the run cannot begin here",
            "it starts from trained weights, and no folder with them is named",
            "write from = 'FOLDER' in the manifest's [model]",
        )
    try:
        weights = WeightsFolder(folder, plan.model)
        found = weights.hash
    except BadModelFolder as error:
        raise Failure("the run cannot begin here", str(error), "") from None
    if found != plan.weights:
        raise Failure(
            "the run cannot begin here",
            f"it starts from the weights {plan.weights[:16]}…, and {folder} holds {found[:16]}…",
            "name the folder with the weights that the manifest means",
        )
    return weights
