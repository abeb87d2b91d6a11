"""Models of sentencepiece as a tokenizer.json that gives equal ids.

A model is a protocol buffer (sentencepiece_model.proto of github.com/google/sentencepiece), of
which this file reads the few fields that determine ids. Each step of sentencepiece has its
counterpart in `tokenizers`:

- its normalization, and spaces as U+2581, with one in front of the text if the model says so;
- unigram: the best path through the pieces. Control pieces and bytes, which a text never matches
  there, get a score that no path through characters is worse than;
- BPE: two symbols are merged if both together are a piece, the piece with the best score first, so
  each way to cut a piece in two becomes a merge. Pieces of the user are matched before all else.

Known differences, all rare. `tokenizers` applies a charsmap to clusters of characters: it drops a
combining mark behind a character that the charsmap replaces, and does not compose clusters of 6
bytes or more (conjoining Hangul). Of two equally good paths, sentencepiece's sums in float32 may
take the other. Overlapping merges to one piece ("aaa") may be done from the other side. A text that
is nothing but one of the user's pieces of BPE gets no space in front.
"""

import base64
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from farflock.node.tokens.tokenizer import BadTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # types of a piece
_UNIGRAM, _BPE = 1, 2
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_UNKNOWN_PENALTY = 10.0  # below the worst piece's score, in both libraries


@dataclass
class _Piece:
    text: str = ""
    score: float = 0.0
    kind: int = _NORMAL


@dataclass
class _Sentencepiece:
    """The fields of a model that determine its ids, with the format's defaults."""

    pieces: list[_Piece] = field(default_factory=list)
    kind: int = _UNIGRAM
    byte_fallback: bool = False
    suffix: bool = False
    charsmap: bytes = b""
    prefix: bool = True
    squeeze: bool = True
    escape: bool = True


def sentencepiece_to_json(raw: bytes, origin: str) -> bytes:
    """Return the tokenizer.json of a model; raise `BadTokenizer` for other bytes, and for the rare
    kinds of models that `tokenizers` has no counterpart of."""
    try:
        model = _model(raw)
    except (ValueError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise BadTokenizer(
            f"{origin} is not a model of sentencepiece ({error}); name a .model or a tokenizer.json"
        ) from None
    _require_convertible(model, origin)
    converted = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added(model)),
        "normalizer": {"type": "Sequence", "normalizers": list(_normalizers(model))},
        "pre_tokenizer": _pre_tokenizer(model),
        "post_processor": None,
        "decoder": _decoder(model),
        "model": _unigram(model) if model.kind == _UNIGRAM else _bpe(model),
    }
    return msgspec.json.format(msgspec.json.encode(converted), indent=2) + b"\n"


def _model(raw: bytes) -> _Sentencepiece:
    model = _Sentencepiece()
    for number, value in _fields(raw):
        if number == 1:
            model.pieces.append(_piece(_message(value)))
        elif number == 2:
            spec = dict(_fields(_message(value)))
            model.kind = _number(spec.get(3, _UNIGRAM))
            model.suffix, model.byte_fallback = bool(spec.get(24)), bool(spec.get(35))
        elif number == 3:
            spec = dict(_fields(_message(value)))
            model.charsmap = _message(spec.get(2, b""))
            model.prefix, model.squeeze = bool(spec.get(3, 1)), bool(spec.get(4, 1))
            model.escape = bool(spec.get(5, 1))
    return model


def _piece(raw: bytes) -> _Piece:
    piece = _Piece()
    for number, value in _fields(raw):
        if number == 1:
            piece.text = _message(value).decode()
        elif number == 2:
            (piece.score,) = struct.unpack("<f", _message(value))
        elif number == 3:
            piece.kind = _number(value)
    return piece


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a message: a varint, or bytes."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(raw, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, at = _varint(raw, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of wire type {kind}")
        if size > len(raw) - at:
            raise ValueError(f"a field of {size} bytes, and {len(raw) - at} are left")
        yield tag >> 3, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return a number of 7 bits a byte, the lowest first, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        value |= (raw[at] & 127) << shift
        at += 1
        if raw[at - 1] < 128:
            return value, at
    raise ValueError("a number of more than 10 bytes")


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where bytes should be")
    return value


def _number(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("bytes where a number should be")
    return value


def _require_convertible(model: _Sentencepiece, origin: str) -> None:
    texts = [piece.text for piece in model.pieces]
    kinds = [piece.kind for piece in model.pieces]
    problem = (
        "holds no pieces"
        if _NORMAL not in kinds
        else "has the same piece twice, or an empty one"
        if len(set(texts)) < len(texts) or "" in texts
        else "has no piece for what is unknown, or several"
        if kinds.count(_UNKNOWN) != 1
        else "has a score that is not finite"
        if not all(math.isfinite(piece.score) for piece in model.pieces)
        else "cuts text into words or characters only"
        if model.kind not in (_UNIGRAM, _BPE)
        else "puts spaces behind words, or leaves them as they are"
        if model.suffix or not model.escape
        else "has pieces that it does not use"
        if model.kind == _BPE and _UNUSED in kinds
        else ""
    )
    if problem:
        raise BadTokenizer(
            f"{origin} {problem}, which cannot be converted; use a unigram or BPE model of "
            "sentencepiece with its usual options, or a tokenizer.json"
        )


def _added(model: _Sentencepiece) -> Iterator[dict[str, Any]]:
    """Yield the special tokens, which are never matched in texts, and for BPE the user's pieces."""
    for place, piece in enumerate(model.pieces):
        user = model.kind == _BPE and _is_users(piece)
        if piece.kind in (_CONTROL, _UNKNOWN) or user:
            yield {
                "id": place,
                "content": piece.text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": user,
                "special": not user,
            }


def _normalizers(model: _Sentencepiece) -> Iterator[dict[str, Any]]:
    if model.charsmap:
        charsmap = base64.b64encode(model.charsmap).decode()
        yield {"type": "Precompiled", "precompiled_charsmap": charsmap}
    if model.squeeze:
        yield _replace({"Regex": r"\A +| +\z"}, "")
        yield _replace({"Regex": " {2,}"}, " ")
    yield _replace({"String": " "}, _SPACE)
    users = [piece.text for piece in model.pieces if _is_users(piece)]
    if model.prefix and model.kind == _BPE and users:
        # `tokenizers` normalizes these pieces too, which must not get a space in front
        alone = "|".join(re.escape(text) for text in users)
        yield _replace({"Regex": rf"\A(?!(?:{alone})?\z)"}, _SPACE)
    elif model.prefix:
        yield {"type": "Prepend", "prepend": _SPACE}


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _pre_tokenizer(model: _Sentencepiece) -> dict[str, Any] | None:
    """Return a cut inside of special pieces' names where a text spells them, at a character that is
    unknown: the best path must not go through such a name."""
    if model.kind == _BPE:
        return None
    known = {piece.text for piece in model.pieces if not _is_unmatched(piece)}
    rests: dict[tuple[str, str], list[str]] = {}  # of names, by what is before and at the character
    for name in (piece.text for piece in model.pieces if _is_unmatched(piece)):
        at = next((place for place, char in enumerate(name) if char not in known), None)
        if at is not None and len(name) > 1:
            rests.setdefault((name[:at], name[at]), []).append(re.escape(name[at + 1 :]))
    if not rests:
        return None
    places = [
        (f"(?<={re.escape(before)})" if before else "") + f"{re.escape(char)}(?={'|'.join(behind)})"
        for (before, char), behind in rests.items()
    ]
    pattern = {"Regex": "|".join(places)}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def _decoder(model: _Sentencepiece) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [_replace({"String": _SPACE}, " ")]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if model.prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _is_unmatched(piece: _Piece) -> bool:
    """True for a piece that texts never match."""
    return piece.kind not in (_NORMAL, _USER)


def _is_users(piece: _Piece) -> bool:
    """True for a piece of the user that texts can match: they have no spaces by then."""
    return piece.kind == _USER and " " not in piece.text


def _unigram(model: _Sentencepiece) -> dict[str, Any]:
    scores = [piece.score for piece in model.pieces if piece.kind == _NORMAL]
    worst = min(scores)

    def score(piece: _Piece) -> float:
        if _is_unmatched(piece):
            return (len(piece.text) + 1) * (min(worst, 0.0) - _UNKNOWN_PENALTY)
        return piece.score

    kinds = [piece.kind for piece in model.pieces]
    return {
        "type": "Unigram",
        "unk_id": kinds.index(_UNKNOWN),
        "vocab": [[piece.text, score(piece)] for piece in model.pieces],
        "byte_fallback": model.byte_fallback,
    }


def _bpe(model: _Sentencepiece) -> dict[str, Any]:
    ranked = {piece.text: piece.score for piece in model.pieces if piece.kind == _NORMAL}
    merges = [
        (-score, text, cut)
        for text, score in ranked.items()
        for cut in range(1, len(text))
        if text[:cut] in ranked and text[cut:] in ranked
    ]
    unknown = next(piece.text for piece in model.pieces if piece.kind == _UNKNOWN)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.text: place for place, piece in enumerate(model.pieces)},
        "merges": [[text[:cut], text[cut:]] for _, text, cut in sorted(merges)],
    }
