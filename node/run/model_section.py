"""`[model]`: the model's shape, and what its weights begin as.

A founder may name a folder in Hugging Face's form (`from`) in place of sizes. What others get is
the hash of the weights (`start`): they download the weights themselves from the swarm, as its
state.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from farflock.compression.activation_catalog import subspace_terms
from farflock.node.data.base_index import index_of
from farflock.node.data.index import BadIndex, Hash, root_of
from farflock.node.errors import Failure, Usage
from farflock.node.model.hf_config import BadModelFolder, config_in
from farflock.node.model.hf_shape import HfShape, canonical_text, hf_shape, text_in
from farflock.node.model.llama import PRESETS, ModelConfig
from farflock.node.model.lora import LoraTerms, adapter_shapes
from farflock.node.run.sections import require_name
from farflock.node.run.sizes import completed, with_experts
from farflock.node.run.terms import RunPlan
from farflock.node.state.weights_file import WeightsFolder
from farflock.swarm.roles import EVERY

_SAVED = "name a folder that transformers' save_pretrained wrote, as in from = 'FOLDER'"
_FREE = ("from", "start", "context", "tied", "balance")  # may differ from a configuration


class ModelSection(ModelConfig, frozen=True, kw_only=True):
    """[model]: the shape of the model, and in `start` the hash of the weights that the run begins
    with (node/state/weights_file.py); without one they are drawn from the run's seed.

    A founder writes `from`, a folder of a Hugging Face model, in place of sizes and hash: relative
    to the manifest's own folder. A resolved manifest has no path. Where only adapters are trained,
    every peer needs these weights, and `files` is the root of an index of the folder's files, by
    which peers fetch them from each other (node/data/base_index.py).

    `hf` is the configuration of a model of transformers (node/model/hf_shape.py), from which the
    sizes follow. A founder writes a folder or a config.json there, with `from` or without."""

    start: Hash | None = None
    files: Hash | None = None
    hf: str | None = None

    def __post_init__(self) -> None:
        if self.hf is None:
            ModelConfig.__post_init__(self)
        else:
            _ = self.shape  # whose sizes have to follow from `hf`

    @property
    def shape(self) -> ModelConfig:
        """The shape alone."""
        sizes = {name: getattr(self, name) for name in ModelConfig.__struct_fields__}
        return ModelConfig(**sizes) if self.hf is None else HfShape(hf=self.hf, **sizes)


def path_of_hf(table: Mapping[str, Any]) -> Path | None:
    """Return the folder, or the config.json, that a founder's `hf` names; None if the table has
    none, or a configuration itself. Raise `Usage` if it is neither."""
    named = table.get("hf")
    if named is None or (isinstance(named, str) and named.startswith("{")):
        return None
    if not isinstance(named, str) or not named:
        raise Usage("model.hf", f"{named!r:.80} is not a path", "name a folder with a config.json")
    return Path(named).expanduser()


def folder_of_model(table: Mapping[str, Any]) -> Path | None:
    """Return the folder that a founder's `[model]` table names, if any; raise `Usage` if that is
    not a path."""
    named = table.get("from")
    if named is None:
        return None
    if not isinstance(named, str) or not named:
        raise Usage("model.from", f"{named!r:.80} is not a path", _SAVED)
    return Path(named).expanduser()


def take_sizes(table: dict[str, Any]) -> Path | None:
    """Replace a founder's folder by the sizes that its config.json says, and return it; None if the
    table names none. Sizes that are given too have to agree: but a context may be shorter, and a
    tied model may get a head of its own."""
    given = table.get("model")
    if not isinstance(given, dict):
        return None
    folder = folder_of_model(given)
    if given.get("hf") is not None:
        _take_hf(table, given)
        return folder
    if folder is None:
        return None
    try:
        config = config_in(folder)
    except BadModelFolder as error:
        raise Usage("model.from", str(error), "") from None
    said = msgspec.to_builtins(config)
    if "preset" in given:
        raise Usage("model.preset", "model.from has the sizes already", "leave out one of them")
    for name, value in given.items():
        if name in said and name not in _FREE and value != said[name]:
            raise Usage(
                f"model.{name}: {value!r:.80}",
                f"the model in {folder} has {said[name]}",
                f"leave out model.{name}",
            )
    _require_room(given, config, folder)
    table["model"] = said | {name: value for name, value in given.items() if name != "from"}
    return folder


def _take_hf(table: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Replace what a founder's `hf` names by the configuration itself and the sizes that follow."""
    if "pipeline" in table:
        why = "a model of a class of transformers is not cut into stages"
        raise Usage("model.hf", why, "leave out [pipeline]")
    path, context = path_of_hf(given), given.get("context")
    try:
        text = canonical_text(given["hf"].encode(), "model.hf") if path is None else text_in(path)
        shape = hf_shape(text, context if isinstance(context, int) else None)
    except BadModelFolder as error:
        raise Usage("model.hf", str(error), "") from None
    said = msgspec.to_builtins(shape)
    known = {*said, *_FREE}
    for name, value in given.items():
        if name not in known or (name != "hf" and value != said.get(name, value)):
            why = "model.hf has the sizes already"
            raise Usage(f"model.{name}", why, f"leave out model.{name}")
    kept = {name: value for name, value in given.items() if name in ("start", "files")}
    table["model"] = said | kept


def _require_room(given: Mapping[str, Any], config: ModelConfig, folder: Path) -> None:
    """Refuse a longer context than the folder's model has, and to drop the head that it has."""
    context = given.get("context")
    if isinstance(context, int) and context > config.context:
        raise Usage(
            f"model.context: {context}",
            f"the model in {folder} has positions for {config.context} tokens",
            f"set it to {config.context} or less",
        )
    if given.get("tied") is True and not config.tied:
        raise Usage(
            "model.tied",
            f"the model in {folder} has a head of its own",
            "leave out model.tied",
        )


def start_of(folder: Path, model: ModelSection, is_base: bool) -> ModelSection:
    """Return the section with the hash of a folder's weights, and with that of its files if these
    are the `is_base` of adapters; raise `Usage` if they are not those of such a model, or of the
    `start` that is given."""
    try:
        found = WeightsFolder(folder, model.shape).hash
        files = root_of(index_of(folder)) if is_base else None
    except (BadModelFolder, BadIndex) as error:
        raise Usage("model.from", str(error), "") from None
    if model.start not in (None, found):
        raise Usage(
            "model.start",
            f"the weights in {folder} have another hash, {found}",
            "leave it out, or name the folder with these weights",
        )
    return msgspec.structs.replace(model, start=found, files=files)


def require_adapters(lora: LoraTerms | None, model: ModelSection, in_stages: bool) -> None:
    """Raise `Usage` if a run cannot train such adapters of this model."""
    if model.hf is not None and in_stages:
        why = "a model of a class of transformers is not cut into stages"
        raise Usage("model.hf", why, "leave out [pipeline]")
    if lora is None:
        return
    if model.hf is not None:
        why = "adapters are for native models, and model.hf names one of transformers"
        raise Usage("train.lora", why, "leave it out, or train a native model")
    if in_stages:
        why = "the stages of a pipeline train all of their weights"
        raise Usage("train.lora", why, "leave it out, or leave out [pipeline]")
    try:
        adapter_shapes(model.shape, lora)
    except ValueError as error:
        raise Usage("train.lora", str(error), "") from None


def require_base(lora: LoraTerms | None, model: ModelSection) -> None:
    """Raise `Usage` unless a run of adapters names the weights beside which they are trained, and
    no other run does."""
    if lora is not None and (model.start is None or model.files is None):
        raise Usage(
            "train.lora",
            "adapters are trained beside the weights of a model, and [model] names none",
            "write from = 'FOLDER' in [model]",
        )
    if lora is None and model.files is not None:
        raise Usage("model.files", "it is for runs with train.lora", "leave it out")


def fill_model(table: dict[str, Any], seq: object) -> None:
    """Replace a preset by its sizes, or fill in those that are left out; a size that is also given
    overrides the preset's. `seq` is the length of a sequence of training."""
    model = dict(table.get("model", {}))
    if "hf" in model:
        return
    named = any(size in model for size in ("dim", "layers", "heads"))
    preset = model.pop("preset", None if named else "demo")
    if preset is not None:
        require_name("model.preset", preset, PRESETS)
        model = msgspec.to_builtins(PRESETS[preset]) | model
    else:
        model = completed(model, seq)
    table["model"] = with_experts(model)


def require_codec(codec: str, model: ModelSection) -> None:
    """Raise `Usage` if a pipeline with this codec cannot start from a folder's weights, or cannot
    have experts."""
    if subspace_terms(codec) is None:
        return
    remedy = "choose another pipeline.codec"
    if model.start is not None:
        why = f"the codec {codec} keeps weights in a random subspace, where trained ones are not"
        raise Usage("model.start", why, f"{remedy}, or start from the run's seed")
    if model.experts is not None:
        why = f"the codec {codec} keeps what layers add in a subspace, and that of experts is not"
        raise Usage("model.experts", why, f"{remedy}, or leave out model.experts")


def first_weights(plan: RunPlan, folder: Path | None) -> WeightsFolder | None:
    """Return what a founder's model begins with: the weights of this folder, or None if the run
    draws them from its seed. Raise `Failure` if the run starts from other weights than are here."""
    if plan.start is None:
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
    if found != plan.start:
        raise Failure(
            "the run cannot begin here",
            f"it starts from the weights {plan.start[:16]}…, and {folder} holds {found[:16]}…",
            "name the folder with the weights that the manifest means",
        )
    return weights


def require_founder(stage: int, role: str) -> None:
    """Raise `Usage` unless the founder of a pipeline with a `start` serves all stages: no other
    peer has the weights of those that it leaves out."""
    if stage != EVERY:
        raise Usage(
            f"--role {role}",
            "the run starts from weights that only its founder has, and the other stages get"
            " theirs from it",
            "start it with --role replica; others may join in any role",
        )
