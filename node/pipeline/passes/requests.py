"""What a trainer asks of a stage server, and what that answers: the bodies of calls (swarm/peer/calls.py). Tensors go
beside them (node/pipeline/passes/edges.py).

A microbatch is named by its trainer, who is the caller, and its number. `epoch` is the round of the stage's stream that the
trainer knew to be applied when the microbatch set out: it stays the same on all of its way, so that both ends of an edge
decode alike. `source` is the stage whose output the input is, -1 for tokens. `came` is the codec of that input, and of its
gradient; `sends` that of the output, and of its gradient, or None where it follows from the sender's weights.
"""

from typing import Annotated, Literal

import msgspec

from farflock.node.run.terms import MAX_VISIT
from farflock.swarm.messages import MAX_CODECS, MAX_STAGES, CodecId, Count

RoundNumber = Annotated[int, msgspec.Meta(ge=-1, le=2**62)]
StageIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STAGES)]
SourceStage = Annotated[int, msgspec.Meta(ge=-1, lt=MAX_STAGES)]


Samples = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=MAX_VISIT)]
Tags = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_VISIT)]
RowIndices = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=MAX_VISIT)], ...], msgspec.Meta(max_length=MAX_VISIT)]
Made = Literal["input", "gradient"]  # of a stage: its input, or the gradient of its output


class BadRequest(ValueError):
    """Bytes that are no request, or no answer."""


class _Body(msgspec.Struct, frozen=True, array_like=True):
    """Encoded as an array whose first item is the tag."""


class Version(msgspec.Struct, frozen=True, array_like=True):
    """Names a stage's weights: the last round in them, and what they come from if the stage was begun anew, else 0."""

    round: RoundNumber
    origin: Count = 0


class Visit(msgspec.Struct, frozen=True, array_like=True):
    """Which of its trainer's samples a microbatch's sequences are, for a codec that remembers them; in a forward request also
    the tags of what the trainer holds of the stage's output of each, 8 bytes, 0 if nothing."""

    samples: Samples
    held: Tags = b""


class Forward(_Body, frozen=True, tag="forward"):
    """Payloads: tokens, and unless the stage takes tokens the activation of `source`. Brings the stage's output."""

    number: Count
    stage: StageIndex
    source: SourceStage
    epoch: RoundNumber
    visit: Visit | None = None
    came: CodecId | None = None
    sends: CodecId | None = None


class Backward(_Body, frozen=True, tag="backward"):
    """Payloads: those of `Forward`, and the gradient of the stage's output, or of the last stage the target tokens. Brings the
    gradient of the stage's input (nothing of the first). What it asks of the weights is put aside until `Confirm`. It is that
    of the weights that `version` names, if it names any: those that the stage's forward pass had."""

    number: Count
    stage: StageIndex
    source: SourceStage
    epoch: RoundNumber
    attempt: Count
    version: Version | None = None
    visit: Visit | None = None
    came: CodecId | None = None
    sends: CodecId | None = None


class Confirm(_Body, frozen=True, tag="confirm"):
    """The gradient that was put aside under this attempt is to count."""

    number: Count
    stage: StageIndex
    attempt: Count


class Revoke(_Body, frozen=True, tag="revoke"):
    """It is not: somebody else does it."""

    number: Count
    stage: StageIndex
    attempt: Count


StageRequest = Forward | Backward | Confirm | Revoke


class Done(_Body, frozen=True, tag="done"):
    """It is done, by this life of the server, under this attempt, in so many seconds of computing, after so many of waiting for
    others; of the last stage's backward pass also the loss in nats, summed over tokens. `version` is that of the weights that
    it was computed with, where servers keep more than the newest."""

    life: Count
    attempt: Count = 0
    took_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    loss_sum: float | None = None
    waited_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    version: Version | None = None


class Busy(_Body, frozen=True, tag="busy"):
    """There is no room for it now."""


class Stale(_Body, frozen=True, tag="stale"):
    """The stage is at this round, too far from the microbatch's."""

    round: RoundNumber


class Gone(_Body, frozen=True, tag="gone"):
    """The weights that a backward pass is to use are not here, where the newest are of this round; if it is `late`, nobody may
    use them any more."""

    round: RoundNumber
    late: bool


class Lacks(_Body, frozen=True, tag="lacks"):
    """What these rows of the activation refer to is not held here, or no more: send them whole."""

    rows: RowIndices


class Foreign(_Body, frozen=True, tag="foreign"):
    """What it came in, or is to be sent in, is a codec that is not read here; these are."""

    reads: Annotated[tuple[CodecId, ...], msgspec.Meta(max_length=MAX_CODECS)]


class Refused(_Body, frozen=True, tag="refused"):
    """It makes no sense here, or can never be done: another stage, payloads that nobody encodes, an attempt that is over. If
    `unread`, a payload that another stage made is to blame: this stage's input, or the gradient of its output."""

    why: Annotated[str, msgspec.Meta(max_length=200)]
    unread: Made | None = None


class Merged(_Body, frozen=True, tag="merged"):
    """What was confirmed is in the sum."""


class Unknown(_Body, frozen=True, tag="unknown"):
    """What was confirmed is not here and never will be."""


StageAnswer = Done | Busy | Stale | Gone | Lacks | Foreign | Refused | Merged | Unknown

_requests: msgspec.msgpack.Decoder[StageRequest] = msgspec.msgpack.Decoder(StageRequest)
_answers: msgspec.msgpack.Decoder[StageAnswer] = msgspec.msgpack.Decoder(StageAnswer)


def encode(body: StageRequest | StageAnswer) -> bytes:
    """The bytes of a request or an answer."""
    return msgspec.msgpack.encode(body)


def decode_request(raw: bytes) -> StageRequest:
    """Read a request; `BadRequest` for anything else."""
    try:
        return _requests.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"not a request to a stage: {error}") from None


def decode_answer(raw: bytes) -> StageAnswer:
    """Read an answer; `BadRequest` for anything else."""
    try:
        return _answers.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"not an answer of a stage: {error}") from None
