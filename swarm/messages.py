"""Every message that peers exchange, with its limits; decoding is typed, so a wrong type or size is refused unread.

Digests are SHA-256. Members are named by their index in the view that the message names: a message of another view
cannot be misread, it is answered with the views that the sender lacks.
"""

from typing import Annotated, Literal

import msgspec

MAX_SHARDS = 4096
MAX_MEMBERS = 64
MAX_TRAIL = 512  # views that a peer keeps and speaks of
MAX_VALUE_BYTES = 240 * 1024  # holds a close list of MAX_SHARDS items; a frame holds it
MAX_CHUNK_BYTES = 4 * 1024 * 1024
MAX_BODY_BYTES = 8 * 1024  # what a call or its answer says without a payload
MAX_PAYLOADS = 4  # of a call, or of its answer
MAX_PAYLOAD_CHUNKS = 16
MAX_CODECS = 16  # that one peer reads
MAX_RECORD_BYTES = 4096
MAX_STAGES = 1024

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Name = Annotated[str, msgspec.Meta(max_length=64)]
Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_CHUNK_BYTES)]
Mask = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
Value = Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]
Signature = Annotated[bytes, msgspec.Meta(max_length=64)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Ballot = tuple[Count, Index]
RoundsByAxis = Annotated[tuple[Count, ...], msgspec.Meta(max_length=1 + MAX_STAGES)]


class Key(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One exchange, or one decision: used once in the life of a run."""

    stream: Name
    round: Count
    attempt: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """Encoded as an array whose first item is the tag; new fields are appended with a default."""


class _InView(_Message, frozen=True):
    """About one exchange or decision, in which members are named by their index in this view."""

    key: Key
    view: Digest


class _Vote(_InView, frozen=True):
    """About one ballot of a decision."""

    ballot: Ballot


# Chunks: the receiver asks for what it has room for, so nothing unasked-for takes memory.


class Want(_Message, frozen=True, tag="want"):
    """Send me bytes [start, stop) of this chunk."""

    digest: Digest
    start: Size
    stop: Size


class Piece(_Message, frozen=True, tag="piece"):
    """The frame's body is bytes [start, start + len(body)) of this chunk of `size` bytes."""

    digest: Digest
    start: Size
    size: Size


class Miss(_Message, frozen=True, tag="miss"):
    """I do not hold this chunk."""

    digest: Digest


# What a member brings to an exchange.


class Offer(_InView, frozen=True, tag="offer"):
    """My encoded shards can be fetched under these digests; `state` is the hash of my state before the round."""

    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_SHARDS)]
    sizes: Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_SHARDS)]
    weight: Weight
    tokens: Count
    state: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


class Reduced(_InView, frozen=True, tag="reduced"):
    """I have reduced this shard of the members in `mask` to the chunk `digest`."""

    shard: Annotated[int, msgspec.Meta(ge=0, lt=MAX_SHARDS)]
    digest: Digest
    size: Size
    mask: Mask


class Holds(_InView, frozen=True, tag="holds"):
    """My holdings, as the first 8 bytes of each item's digest (zeros: nothing)."""

    prefixes: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_SHARDS)]


class Tally(_Message, frozen=True, tag="tally"):
    """For this round, which is the stream's next one here, I have taken in so many tokens; and whether the run is over to me,
    so that I begin no more rounds (swarm/peer/tallies.py)."""

    key: Key
    tokens: Count
    over: bool = False


class Load(_Message, frozen=True, tag="load"):
    """In this period I have so many microbatches waiting, do so many a second, have memory for a stage of so many bytes, and
    have served mine for so long (swarm/peer/load_reports.py)."""

    number: Count
    queue: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    rate: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    memory_bytes: Count
    resident_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class CodecId(msgspec.Struct, frozen=True, array_like=True):
    """Names what a payload is written in: an activation codec and its version; where both ends share parameters, the first
    bytes of their digest."""

    name: Name
    version: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    digest: Annotated[bytes, msgspec.Meta(max_length=8)] = b""


class Reads(_Message, frozen=True, tag="reads"):
    """I read, and write, payloads of passes in these codecs (swarm/peer/codec_offers.py)."""

    codecs: Annotated[tuple[CodecId, ...], msgspec.Meta(max_length=MAX_CODECS)]


# Single-decree Paxos among the members of a view (swarm/protocol/decide.py).


class Prepare(_Vote, frozen=True, tag="prepare"):
    """Phase 1a."""


class Promise(_Vote, frozen=True, tag="promise"):
    """Phase 1b, with the value of the highest ballot accepted so far; `floor` are the least rounds, by axis
    (swarm/protocol/axes.py), that a new one could begin at here (views only)."""

    accepted: Ballot | None = None
    value: Value | None = None
    floor: RoundsByAxis = ()


class Propose(_Vote, frozen=True, tag="propose"):
    """Phase 2a."""

    value: Value


class Accepted(_Vote, frozen=True, tag="accepted"):
    """Phase 2b; `proof` is the member's signature where the decision must convince outsiders (views)."""

    proof: Signature = b""


class Rejected(_Vote, frozen=True, tag="rejected"):
    """A higher ballot was promised, or the value cannot be accepted here; `floor` are the least rounds that could."""

    promised: Ballot
    floor: RoundsByAxis = ()


class Decided(_InView, frozen=True, tag="decided"):
    """The value is chosen; `ballot` and `proofs` certify it where members sign."""

    value: Value
    ballot: Ballot = (0, 0)
    proofs: Annotated[tuple[tuple[Index, Signature], ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()


class LogQuery(_Message, frozen=True, tag="log?"):
    """Tell me the close list that was decided for this key. `notes` alone, what the round was about, can be had long
    after the round's content is gone."""

    key: Key
    notes: bool = False


class Forgotten(_Message, frozen=True, tag="forgotten"):
    """That round has left my log; the oldest and the newest that I hold."""

    key: Key
    oldest: Count
    newest: Count


# Pairs (swarm/protocol/pair.py).


class PairPropose(_Message, frozen=True, tag="pair"):
    """Let us two exchange; here is my offer."""

    offer: Offer


class PairAccept(_Message, frozen=True, tag="pair+"):
    """Yes; here is mine."""

    offer: Offer


class PairRefuse(_Message, frozen=True, tag="pair-"):
    """No: I am at `round`, or taken."""

    key: Key
    round: Count


class PairHave(_Message, frozen=True, tag="have"):
    """I hold both payloads; this is their common hash. `ask` repeats it and wants the decision."""

    key: Key
    digest: Digest
    ask: bool = False


class PairCommit(_Message, frozen=True, tag="commit"):
    """I have applied; apply."""

    key: Key


class PairAbort(_Message, frozen=True, tag="abort"):
    """This exchange did not happen on my side and never will."""

    key: Key


# Membership, state, time.


class ViewQuery(_Message, frozen=True, tag="views?"):
    """Send me the views from this number on."""

    number: Count


class Views(_Message, frozen=True, tag="views"):
    """Consecutive certified views, oldest first."""

    views: Annotated[tuple[Value, ...], msgspec.Meta(max_length=16)]


class Join(_Message, frozen=True, tag="join"):
    """Admit me to the next view."""

    record: Annotated[bytes, msgspec.Meta(max_length=MAX_RECORD_BYTES)]


class Leave(_Message, frozen=True, tag="leave"):
    """I am going; drop me from the next view."""


class StateQuery(_Message, frozen=True, tag="state?"):
    """Tell me which snapshot you can serve."""

    stream: Name


class StateOffer(_Message, frozen=True, tag="state"):
    """My snapshot after `round` (-1: before the first): `digest` names a chunk that lists the snapshot's chunks, `view` the
    newest view that I know: a state belongs to one chain of views."""

    stream: Name
    view: Digest
    round: Annotated[int, msgspec.Meta(ge=-1, le=2**62)]
    state: Annotated[bytes, msgspec.Meta(max_length=32)]
    digest: Digest
    size: Size
    tokens: Count


class Ping(_Message, frozen=True, tag="ping"):
    """A time question; `sent_s` comes back unchanged."""

    sent_s: float


class Pong(_Message, frozen=True, tag="pong"):
    """The answer: my run time when I saw the question."""

    sent_s: float
    run_s: float


# Calls (swarm/peer/calls.py). A payload is a run of chunks; an empty one has none.

Body = Annotated[bytes, msgspec.Meta(max_length=MAX_BODY_BYTES)]
PayloadChunk = tuple[Digest, Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_BYTES)]]
Payload = Annotated[tuple[PayloadChunk, ...], msgspec.Meta(max_length=MAX_PAYLOAD_CHUNKS)]
Payloads = Annotated[tuple[Payload, ...], msgspec.Meta(max_length=MAX_PAYLOADS)]
CallVerdict = Literal["ok", "full", "failed", "late"]


class Call(_Message, frozen=True, tag="call"):
    """Do this once; the payloads can be fetched from me. Ids are those of one life of the sender."""

    id: Count
    request: Body
    payloads: Payloads = ()


class Answer(_Message, frozen=True, tag="answer"):
    """To the call `id` that you made in life `incarnation`. Only "ok" brings something; "full": nothing was done, ask again;
    "failed": it cannot be done; "late": your payloads did not come in time, or what I answered is gone."""

    incarnation: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    id: Count
    verdict: CallVerdict
    body: Body = b""
    payloads: Payloads = ()


class Heard(_Message, frozen=True, tag="heard"):
    """I have, or no longer want, the answer to my call `id`."""

    id: Count


# Branches (swarm/protocol/branches.py).


class BranchAsk(_Message, frozen=True, tag="branch?"):
    """No quorum of our view has been there for long: sign this branch of it, which lists you."""

    view: Value


class BranchSign(_Message, frozen=True, tag="branch"):
    """My signature under the branch of this hash; empty if I cannot: it has to begin at round `floor` or later."""

    digest: Digest
    proof: Signature = b""
    floor: Count = 0


class Lineage(_Message, frozen=True, tag="lineage"):
    """The chain of views that I am on, up to view `number`: the first 8 bytes of each kept view's hash, oldest first.
    Its agreed tokens as far as I know; and to who asked and has fewer, the certified views that it lacks."""

    tokens: Count
    number: Count
    trail: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8 * MAX_TRAIL)]
    views: Annotated[tuple[Value, ...], msgspec.Meta(max_length=MAX_TRAIL)] = ()


ChunkMessage = Want | Piece | Miss
ShardMessage = Offer | Reduced | Holds
PaxosMessage = Prepare | Promise | Propose | Accepted | Rejected | Decided
LogMessage = LogQuery | Forgotten
PairMessage = PairPropose | PairAccept | PairRefuse | PairHave | PairCommit | PairAbort
ViewMessage = ViewQuery | Views | Join | Leave
SnapshotMessage = StateQuery | StateOffer
TimeMessage = Ping | Pong
CallMessage = Call | Answer | Heard
BranchMessage = BranchAsk | BranchSign | Lineage

Message = (
    ChunkMessage
    | ShardMessage
    | PaxosMessage
    | LogMessage
    | PairMessage
    | ViewMessage
    | SnapshotMessage
    | TimeMessage
    | CallMessage
    | Tally
    | Load
    | Reads
    | BranchMessage
)
