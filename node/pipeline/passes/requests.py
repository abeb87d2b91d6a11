"""Requests of trainers to stage servers, and their answers: the bodies of calls.

Tensors travel as payloads of the call (swarm/peer/calls.py, node/pipeline/passes/edges.py).

A microbatch is named by its trainer, the caller, and its number. `epoch` is the newest round of
the stage's stream that the trainer knew to be applied when the microbatch set out; it stays the
same for the whole walk, so that both ends of an edge decode alike. `source` is the stage whose
output is the input, -1 for tokens. `came` is the codec of that input and of its gradient;
`sends` is that of the output and of its gradient, None where the sender's weights determine it."""

from typing import Annotated, Literal

import msgspec

from farflock.node.run.terms import MAX_VISIT
from farflock.swarm.messages import MAX_CODECS, MAX_STAGES, CodecId, Count

RoundNumber = Annotated[int, msgspec.Meta(ge=-1, le=2**62)]
StageIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STAGES)]
SourceStage = Annotated[int, msgspec.Meta(ge=-1, lt=MAX_STAGES)]


Samples = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=MAX_VISIT)]
Tags = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_VISIT)]
RowIndices = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, lt=MAX_VISIT)], ...], msgspec.Meta(max_length=MAX_VISIT)
]
Made = Literal["input", "gradient"]  # of a stage: its input, or the gradient of its output


class BadRequest(ValueError):
    """The bytes are not a valid request or answer."""


class _Body(msgspec.Struct, frozen=True, array_like=True):
    """Encoded as an array whose first item is the tag."""


class Version(msgspec.Struct, frozen=True, array_like=True):
    """Names a version of a stage's weights by the last round in them and, if the stage has
    started over, by a number for the state with which it did (otherwise 0)."""

    round: RoundNumber
    origin: Count = 0


class Visit(msgspec.Struct, frozen=True, array_like=True):
    """The trainer's samples in a microbatch, for a codec that remembers them.

    A forward request also carries, for each sample, the 8-byte tag of the stage's output that the
    trainer holds, 0 for none."""

    samples: Samples
    held: Tags = b""


class Forward(_Body, frozen=True, tag="forward"):
    """Asks for the stage's output. Payloads: the tokens and, except at a stage that takes tokens,
    the activation of `source`."""

    number: Count
    stage: StageIndex
    source: SourceStage
    epoch: RoundNumber
    visit: Visit | None = None
    came: CodecId | None = None
    sends: CodecId | None = None


class HeldOutForward(_Body, frozen=True, tag="measure"):
    """Asks for the stage's output on held-out text, with the weights that the method evaluates. No
    backward pass follows: the server keeps nothing of it. At the last stage the output is the mean
    loss of each sequence.

    Payloads: those of `Forward` and, at the last stage, the target tokens. `number` is that of the
    microbatch in its evaluation."""

    number: Count
    stage: StageIndex
    source: SourceStage
    epoch: RoundNumber
    came: CodecId | None = None
    sends: CodecId | None = None


class Backward(_Body, frozen=True, tag="backward"):
    """Asks for the gradient of the stage's input (none at the first stage).

    Payloads: those of `Forward`, and the gradient of the stage's output or, at the last stage,
    the target tokens. The gradient of the weights stays pending until `Confirm`. It is computed
    at the weights of `version`, if given: those of the stage's forward pass."""

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
    """Asks to merge the pending gradient of this attempt; `view` is the newest that the trainer
    knows."""

    number: Count
    stage: StageIndex
    attempt: Count
    view: Count = 0


class Revoke(_Body, frozen=True, tag="revoke"):
    """Asks to drop the pending gradient of this attempt: another server computes it."""

    number: Count
    stage: StageIndex
    attempt: Count


StagePass = Forward | Backward | HeldOutForward
StageRequest = StagePass | Confirm | Revoke


class Done(_Body, frozen=True, tag="done"):
    """The pass is done. `life` is the server's; `took_s` is the time it computed, `waited_s` the
    time in its queue, and `loss_sum` the loss in nats summed over tokens, after the last stage's
    backward pass. `version` is that of the weights, if servers keep more than the newest."""

    life: Count
    attempt: Count = 0
    took_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    loss_sum: float | None = None
    waited_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    version: Version | None = None


class Busy(_Body, frozen=True, tag="busy"):
    """The queue is full for now."""


class Stale(_Body, frozen=True, tag="stale"):
    """The stage is at this round, too far from the microbatch's epoch."""

    round: RoundNumber


class Gone(_Body, frozen=True, tag="gone"):
    """The weights for a backward pass are not here; the newest are of `round`. If `late`, they are
    too old for use."""

    round: RoundNumber
    late: bool


class Lacks(_Body, frozen=True, tag="lacks"):
    """The server does not hold the values to which these rows of the activation refer: send the
    rows whole."""

    rows: RowIndices


class Foreign(_Body, frozen=True, tag="foreign"):
    """The server does not read a codec of the request; `reads` are those that it does."""

    reads: Annotated[tuple[CodecId, ...], msgspec.Meta(max_length=MAX_CODECS)]


class Refused(_Body, frozen=True, tag="refused"):
    """The request makes no sense here or can never be served: another stage, undecodable payloads,
    an attempt that is over. `unread` names the payload of another stage that is to blame: this
    stage's input or its output's gradient."""

    why: Annotated[str, msgspec.Meta(max_length=200)]
    unread: Made | None = None


class NotFinite(_Body, frozen=True, tag="not finite"):
    """The stage's output on held-out text is not finite."""


class Merged(_Body, frozen=True, tag="merged"):
    """The confirmed gradient is in the sum."""


class Unknown(_Body, frozen=True, tag="unknown"):
    """The gradient is not here and never will be."""


StageAnswer = Done | Busy | Stale | Gone | Lacks | Foreign | Refused | NotFinite | Merged | Unknown


class Reserve(_Body, frozen=True, tag="reserve"):
    """Asks a member which stage the caller, a newcomer, should serve; it is for no stage."""


class Reserved(_Body, frozen=True, tag="reserved"):
    """The stage that a newcomer should serve."""

    stage: StageIndex


RESERVE = msgspec.msgpack.encode(Reserve())
_reserved: msgspec.msgpack.Decoder[Reserved] = msgspec.msgpack.Decoder(Reserved)
_requests: msgspec.msgpack.Decoder[StageRequest] = msgspec.msgpack.Decoder(StageRequest)
_answers: msgspec.msgpack.Decoder[StageAnswer] = msgspec.msgpack.Decoder(StageAnswer)


def encode(body: StageRequest | StageAnswer | Reserved) -> bytes:
    """Encode a request or an answer."""
    return msgspec.msgpack.encode(body)


def decode_request(raw: bytes) -> StageRequest:
    """Decode a request; raise `BadRequest` for anything else."""
    try:
        return _requests.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"not a request to a stage: {error}") from None


def decode_answer(raw: bytes) -> StageAnswer:
    """Decode an answer; raise `BadRequest` for anything else."""
    try:
        return _answers.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"not an answer of a stage: {error}") from None


def decode_reserved(raw: bytes) -> int:
    """Return the stage in an answer to `RESERVE`; raise `BadRequest` for anything else."""
    try:
        return _reserved.decode(raw).stage
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"not a reservation: {error}") from None
