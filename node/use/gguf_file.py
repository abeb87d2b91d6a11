"""A GGUF file of a model, which llama.cpp and what is built on it read.

Tensors have llama.cpp's names. It rotates the pairs (2i, 2i + 1) of a head, and our weights the
pairs (i, i + K/2), so the rows of queries and keys are put in another order, as by
convert_hf_to_gguf.py of github.com/ggml-org/llama.cpp. It knows tokenizers by name: a tokenizer is
written if it is byte-level BPE whose cuts have a name there.

Shapes: H heads, K width of a head, D model width.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from farflock.node.model.export import WeightType, byte_level, converted
from farflock.node.model.hf_shape import HfShape
from farflock.node.model.llama import ModelConfig, scaled
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

_CONVERT = "leave out --gguf, and convert the export with llama.cpp's convert_hf_to_gguf.py"
_ARCHITECTURE = "llama"
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How a tokenizer cuts text before BPE, and whether whole words come first: llama.cpp's name.
_CUTS = {
    (None, False): "gpt-2",
    (rf"{_LETTERS}\p{{N}}{{1,3}}{_OTHERS}", True): "llama-bpe",
    (rf"{_LETTERS}\p{{N}}{_OTHERS}", False): "qwen2",
}
_UNCUT = ""  # the text as it is, which any name fits if nothing is merged


class GgufRefused(ValueError):
    """A model that cannot be written as GGUF; the message says why and what to do."""


def gguf_writer(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    dtype: WeightType,
    *,
    name: str = "farflock",
    template: str | None = None,
) -> Callable[[Path], None]:
    """Return a function that writes the file, tensor by tensor; vectors stay float32. Raise
    `GgufRefused` at once for what llama.cpp could not compute alike, or if `gguf` is missing."""
    try:
        from gguf import GGUFWriter
    except ImportError:
        raise GgufRefused(
            'GGUF is written by the package `gguf`; pip install "farflock[gguf]", or leave out '
            "--gguf"
        ) from None
    if isinstance(config, HfShape):
        raise GgufRefused(f"a model of a class of transformers is not written as GGUF; {_CONVERT}")
    if config.experts is not None:
        raise GgufRefused(f"a model of experts is not written as GGUF; {_CONVERT}")
    vocabulary = GgufVocabulary(tokenizer)

    def write(path: Path) -> None:
        writer = GGUFWriter(path, _ARCHITECTURE)
        writer.add_name(name)
        _add_shape(writer, config, dtype)
        vocabulary.add_to(writer, config.vocab_size)
        if template is not None:
            writer.add_chat_template(template)
        _write_tensors(writer, dict(_tensors(config, weights)), dtype)

    return write


def _add_shape(writer: "GGUFWriter", config: ModelConfig, dtype: WeightType) -> None:
    from gguf import LlamaFileType

    types = {
        "bfloat16": LlamaFileType.MOSTLY_BF16,
        "float16": LlamaFileType.MOSTLY_F16,
        "float32": LlamaFileType.ALL_F32,
    }
    writer.add_file_type(types[dtype])
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn_dim)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)


def _tensors(config: ModelConfig, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor by its name in the file."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.layers)
    heads = {"q_proj.weight": config.heads, "k_proj.weight": config.kv_heads}
    if config.rope_scaling is not None:
        yield "rope_freqs.weight", _rope_factors(config)
    for name, weight in weights.items():
        there = names.get_name(name, try_suffixes=(".weight",))
        assert there is not None, f"{name} has no name in GGUF"
        kind = ".".join(name.split(".")[-2:])
        yield there, interleaved(weight, heads[kind]) if kind in heads else weight


def interleaved(weight_ED: Tensor, heads: int) -> Tensor:
    """Return rows (H·K, D) in the order in which the two of a rotated pair are neighbours."""
    width, columns = weight_ED.shape[0] // heads, weight_ED.shape[1]
    pairs = weight_ED.reshape(heads, 2, width // 2, columns)
    return pairs.transpose(1, 2).reshape(weight_ED.shape)


def _rope_factors(config: ModelConfig) -> Tensor:
    """Return what each frequency is divided by."""
    powers = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**powers
    return frequencies / scaled(frequencies, config.rope_scaling)


def _write_tensors(writer: "GGUFWriter", tensors: Mapping[str, Tensor], dtype: WeightType) -> None:
    import numpy as np
    from gguf import GGMLQuantizationType

    kinds = {
        "bfloat16": GGMLQuantizationType.BF16,
        "float16": GGMLQuantizationType.F16,
        "float32": GGMLQuantizationType.F32,
    }
    for name, weight in tensors.items():
        kind = _type_of(weight, dtype)
        width = getattr(torch, kind).itemsize
        shape = (*weight.shape[:-1], weight.shape[-1] * width)  # in bytes, which numpy has for all
        size = weight.numel() * width
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), size, kinds[kind])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, weight in tensors.items():
            there = converted(name, weight.detach(), _type_of(weight, dtype))
            writer.write_tensor_data(there.view(torch.uint8).numpy())
    finally:
        writer.close()


def _type_of(weight: Tensor, dtype: WeightType) -> WeightType:
    return "float32" if weight.dim() == 1 else dtype


class GgufVocabulary:
    """A byte-level BPE tokenizer as llama.cpp has it. Raise `GgufRefused` for any other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        own = isinstance(tokenizer, JsonTokenizer)
        raw = tokenizer.raw if isinstance(tokenizer, JsonTokenizer) else byte_level()
        self._described: dict[str, Any] = msgspec.json.decode(raw)
        self._begin = tokenizer.begin_of_text if isinstance(tokenizer, JsonTokenizer) else None
        self._end = tokenizer.end_of_text
        self._merges = [
            merge if isinstance(merge, str) else " ".join(merge)
            for merge in self._described["model"].get("merges") or []
        ]
        self._cut = self._named_cut() if own else "gpt-2"

    def _named_cut(self) -> str:
        model, normal = self._described["model"], self._described.get("normalizer")
        bytes_of_text = _ByteCut(self._described.get("pre_tokenizer"))
        byte_fallback = bool(model.get("byte_fallback"))
        if model.get("type") != "BPE" or byte_fallback or not bytes_of_text.is_byte_level:
            raise GgufRefused(f"the tokenizer is not byte-level BPE; {_CONVERT}")
        cut = (bytes_of_text.pattern, bool(model.get("ignore_merges")))
        composes = normal == {"type": "NFC"} and _CUTS.get(cut) == "qwen2"
        if normal is None or composes:
            if cut in _CUTS:
                return _CUTS[cut]
            if bytes_of_text.pattern == _UNCUT and not self._merges:
                return "gpt-2"
        raise GgufRefused(
            f"the tokenizer cuts or changes texts in a way that GGUF has no name for; {_CONVERT}"
        )

    def add_to(self, writer: "GGUFWriter", size: int) -> None:
        """Write the tokens of a model's vocabulary of `size`; those that the tokenizer lacks are
        unused."""
        from gguf import TokenType

        names = [f"[PAD{place}]" for place in range(size)]
        kinds = [int(TokenType.UNUSED)] * size
        for name, place in self._described["model"]["vocab"].items():
            names[place], kinds[place] = name, int(TokenType.NORMAL)
        for added in self._described.get("added_tokens") or []:
            kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
            names[added["id"]], kinds[added["id"]] = added["content"], int(kind)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self._cut)
        writer.add_token_list(names)
        writer.add_token_types(kinds)
        writer.add_token_merges(self._merges)
        writer.add_eos_token_id(self._end)
        writer.add_add_bos_token(self._begin is not None)
        writer.add_add_eos_token(False)
        if self._begin is not None:
            writer.add_bos_token_id(self._begin)


class _ByteCut:
    """The way in which a tokenizer.json cuts a text into words and takes their bytes: by GPT-2's
    pattern (None), by a pattern of its own, or not at all."""

    def __init__(self, described: object) -> None:
        steps = _steps(described)
        last = steps[-1] if steps else {}
        self.is_byte_level = last.get("type") == "ByteLevel" and not last.get("add_prefix_space")
        by_gpt2 = bool(last.get("use_regex", True))
        patterns = [_split(step) for step in steps[:-1]]
        self.pattern: str | None = "unknown"
        if not patterns:
            self.pattern = None if by_gpt2 else _UNCUT
        elif len(patterns) == 1 and not by_gpt2:
            self.pattern = patterns[0]


def _steps(described: object) -> list[dict[str, Any]]:
    if not isinstance(described, dict):
        return []
    nested = described.get("pretokenizers")
    return list(nested) if described.get("type") == "Sequence" and nested else [described]


def _split(step: Mapping[str, Any]) -> str:
    """Return the pattern whose matches become words."""
    pattern = step.get("pattern")
    usual = step.get("type") == "Split" and step.get("behavior") == "Isolated"
    if usual and not step.get("invert") and isinstance(pattern, dict):
        return str(pattern.get("Regex", "unknown"))
    return "unknown"
