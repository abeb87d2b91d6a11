"""Every message between peers, with its limits; decoding refuses wrong types and sizes.

Digests are BLAKE3. A member is named by its index in the view that the message names: a message of
another view cannot be misread; it is answered with the views that its sender is missing.
"""

from typing import Annotated, Literal

import msgspec

MAX_BUNDLES = 4096  # items of one exchange: a bundle of shards, of one member or of all
MAX_CHANGES = 4096  # of one report of holdings
MAX_MEMBERS = 64
MAX_TRAIL = 512  # views that a peer keeps and may send
MAX_VALUE_BYTES = 240 * 1024  # fits a close list of MAX_BUNDLES items; fits in a frame
MAX_CHUNK_BYTES = 4 * 1024 * 1024
MAX_BATCH_CHUNKS = 1024  # asked for and sent together
MAX_BODY_BYTES = 8 * 1024  # body of a call or its answer, without payloads
MAX_PAYLOADS = 4  # per call, and per answer
MAX_PAYLOAD_CHUNKS = 16
MAX_INLINE_BYTES = 256_000  # payloads inside a call or an answer; fits in a frame with its body
MAX_HOLDERS = 3  # of one payload, named in a call
MAX_LEFT_IDS = 256  # in one message that renews what was left
MAX_CODECS = 16  # readable by one peer
MAX_RECORD_BYTES = 4096
MAX_HEAD_BYTES = 512  # of a run, with its signature (node/run/head.py)
MAX_STAGES = 1024
MAX_HELD = 128  # states that one peer holds: a full replica has that of each stage
MAX_LOSS = 1e6  # in nats a token or bits a byte
MAX_EVALUATIONS = 256  # that a peer keeps, and that one message has
MAX_SAMPLE_CHARS = 400
MAX_HELD_CHUNKS = 1 << 16  # of data that one answer speaks of

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]
SealedRecord = Annotated[bytes, msgspec.Meta(max_length=MAX_RECORD_BYTES)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Name = Annotated[str, msgspec.Meta(max_length=64)]
Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_CHUNK_BYTES)]
Mask = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
Value = Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]
Signature = Annotated[bytes, msgspec.Meta(max_length=64)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
BoundedLoss = Annotated[float, msgspec.Meta(ge=0, le=MAX_LOSS)]
Ballot = tuple[Count, Index]
RoundsByAxis = Annotated[tuple[Count, ...], msgspec.Meta(max_length=1 + MAX_STAGES)]


class Key(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The name of one exchange or decision; used once in the life of a run."""

    stream: Name
    round: Count
    attempt: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """Encoded as an array whose first item is the tag; new fields are appended with a default."""


class _InView(_Message, frozen=True):
    """A message on one exchange or decision; members are named by their index in this view."""

    key: Key
    view: Digest


class _Vote(_InView, frozen=True):
    """A message on one ballot of a decision."""

    ballot: Ballot


# Chunks: the receiver asks for what it has room for, so nothing unrequested takes up memory.


class Want(_Message, frozen=True, tag="want"):
    """A request for bytes [start, stop) of a chunk, in pieces of at most `piece` bytes; or for a
    whole small chunk together with further ones, whose digests `more` holds (swarm/batch.py). If it
    `packs`, pieces of a single chunk may come compressed (swarm/packing.py)."""

    digest: Digest
    start: Size
    stop: Size
    piece: Size = 0
    more: Annotated[bytes, msgspec.Meta(max_length=32 * (MAX_BATCH_CHUNKS - 1))] = b""
    packs: bool = False


class Piece(_Message, frozen=True, tag="piece"):
    """Bytes [start, start + len(body)) of a chunk of `size` bytes, in the frame's body. In
    the answer to a batch, `more` holds the sizes of the further chunks, 4 bytes each (0: it is not
    there), whose bytes follow. If it is `packed`, the body is compressed."""

    digest: Digest
    start: Size
    size: Size
    more: Annotated[bytes, msgspec.Meta(max_length=4 * (MAX_BATCH_CHUNKS - 1))] = b""
    packed: bool = False


class Miss(_Message, frozen=True, tag="miss"):
    """The answer of a peer that does not hold the chunk."""

    digest: Digest


class Probe(_Message, frozen=True, tag="probe"):
    """A question whether all pieces that the sender wanted before have left. `number` is that of
    its last request that it asks about, and comes back unchanged."""

    number: Count


class Probed(_Message, frozen=True, tag="probed"):
    """The answer to a `Probe`, sent behind these pieces: those that are not there are lost."""

    number: Count


# Data to train on: chunks that are numbered, under the hash of their index (peer/data_holders.py).


class DataQuery(_Message, frozen=True, tag="data?"):
    """A question which chunks of the data with this root the receiver can send, from number `first`
    on, a multiple of `MAX_HELD_CHUNKS`."""

    root: Digest
    first: Count


class DataHeld(_Message, frozen=True, tag="data"):
    """The chunks of the data that the sender can send: bit n mod 8 (1 is the lowest) of byte n
    div 8 says it of number `first` + n. `size` is that of the index; 0: the sender has none."""

    root: Digest
    first: Count
    size: Size
    held: Annotated[bytes, msgspec.Meta(max_length=MAX_HELD_CHUNKS // 8)]


# A member's contribution to an exchange.


class Evaluation(msgspec.Struct, frozen=True, array_like=True):
    """A member's measurement of the weights with which a round began, at most 64 bytes.

    `tokens` are the run's by then. The loss (None: it was no finite number) and its standard error
    are in nats a token; `bits_per_byte` is None where the tokenizer does not say how long its
    tokens are."""

    round: Count
    tokens: Count
    loss: BoundedLoss | None
    standard_error: BoundedLoss
    bits_per_byte: BoundedLoss | None = None


class Offer(_InView, frozen=True, tag="offer"):
    """Digests and sizes of the sender's bundles of encoded shards; `state` is the hash of its state
    before the round, and `evaluation` what it measured since its last one."""

    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_BUNDLES)]
    sizes: Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_BUNDLES)]
    weight: Weight
    tokens: Count
    state: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    evaluation: Evaluation | None = None


class Reduced(_InView, frozen=True, tag="reduced"):
    """The sender reduced this bundle of the members in `mask`; `digest` is that of the result."""

    bundle: Annotated[int, msgspec.Meta(ge=0, lt=MAX_BUNDLES)]
    digest: Digest
    size: Size
    mask: Mask


class Holds(_InView, frozen=True, tag="holds"):
    """Changes of the sender's holdings, from its change `first` on; 12 bytes each: a place, and
    the first 8 bytes of the digest there (zeros: nothing). `known` is how many of the receiver's
    changes the sender knows, `offered` whether it has the receiver's offer; unless it `asks`, it
    only answers (swarm/protocol/exchange/holdings.py)."""

    first: Count
    changes: Annotated[bytes, msgspec.Meta(max_length=12 * MAX_CHANGES)]
    known: Count = 0
    offered: bool = False
    asks: bool = True


class Away(_Message, frozen=True, tag="away"):
    """The sender contributes nothing to the stream's rounds before `key.round`, but votes on them:
    nobody waits for its offer (swarm/peer/absences.py)."""

    key: Key


class Tally(_Message, frozen=True, tag="tally"):
    """The sender's tokens for the stream's next round, which is `key.round`; `over` if the run is
    over for it, so that it begins no more rounds (swarm/peer/tallies.py)."""

    key: Key
    tokens: Count
    over: bool = False


class Load(_Message, frozen=True, tag="load"):
    """The sender's load in period `number` (swarm/peer/load_reports.py): microbatches waiting and
    done per second, memory for a stage, and the time that it has served its own."""

    number: Count
    queue: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    rate: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    memory_bytes: Count
    resident_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class CodecId(msgspec.Struct, frozen=True, array_like=True):
    """An activation codec, its version, and a digest prefix of parameters that both ends share."""

    name: Name
    version: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    digest: Annotated[bytes, msgspec.Meta(max_length=8)] = b""


class Reads(_Message, frozen=True, tag="reads"):
    """The codecs in which the sender reads and writes passes (swarm/peer/codec_offers.py)."""

    codecs: Annotated[tuple[CodecId, ...], msgspec.Meta(max_length=MAX_CODECS)]


# Single-decree Paxos among the members of a view (swarm/protocol/decide.py).


class Prepare(_Vote, frozen=True, tag="prepare"):
    """Phase 1a of Paxos: a proposer asks for promises."""


class Promise(_Vote, frozen=True, tag="promise"):
    """Phase 1b, with the value of the highest ballot accepted so far. `floor` (views only): the
    lowest rounds, by axis (swarm/protocol/axes.py), at which a new view could begin here."""

    accepted: Ballot | None = None
    value: Value | None = None
    floor: RoundsByAxis = ()


class Propose(_Vote, frozen=True, tag="propose"):
    """Phase 2a of Paxos: a proposer asks for acceptances."""

    value: Value


class Accepted(_Vote, frozen=True, tag="accepted"):
    """Phase 2b; `proof` is a signature where outsiders must be convinced (views)."""

    proof: Signature = b""


class Rejected(_Vote, frozen=True, tag="rejected"):
    """A higher ballot was promised, or the value needs first rounds of at least `floor`."""

    promised: Ballot
    floor: RoundsByAxis = ()


class Decided(_InView, frozen=True, tag="decided"):
    """The chosen value; `ballot` and `proofs` certify it where members sign."""

    value: Value
    ballot: Ballot = (0, 0)
    proofs: Annotated[
        tuple[tuple[Index, Signature], ...], msgspec.Meta(max_length=MAX_MEMBERS)
    ] = ()


class LogQuery(_Message, frozen=True, tag="log?"):
    """A request for the close list that was decided for this key.

    `notes` asks only for the last shards, which outlive the rest of the round's content."""

    key: Key
    notes: bool = False


class Forgotten(_Message, frozen=True, tag="forgotten"):
    """The round has left the sender's log, which now holds `oldest` to `newest`."""

    key: Key
    oldest: Count
    newest: Count


# Pairs (swarm/protocol/pair.py).


class PairPropose(_Message, frozen=True, tag="pair"):
    """An offer to exchange as a pair."""

    offer: Offer


class PairAccept(_Message, frozen=True, tag="pair+"):
    """The acceptance of a pair exchange, with the sender's own offer."""

    offer: Offer


class PairRefuse(_Message, frozen=True, tag="pair-"):
    """A refusal: the sender is at `round`, or already taken."""

    key: Key
    round: Count


class PairHave(_Message, frozen=True, tag="have"):
    """The sender holds both payloads, of this joint hash; `ask` repeats it to get the decision."""

    key: Key
    digest: Digest
    ask: bool = False


class PairCommit(_Message, frozen=True, tag="commit"):
    """The sender has applied the exchange, and so must the receiver."""

    key: Key


class PairAbort(_Message, frozen=True, tag="abort"):
    """The exchange did not happen on the sender's side and never will."""

    key: Key


# Membership, state, time.


class ViewQuery(_Message, frozen=True, tag="views?"):
    """A request for the views from this number on."""

    number: Count


class Views(_Message, frozen=True, tag="views"):
    """Consecutive certified views, oldest first."""

    views: Annotated[tuple[Value, ...], msgspec.Meta(max_length=16)]


class Join(_Message, frozen=True, tag="join"):
    """A request to be admitted to the next view."""

    record: SealedRecord


class Leave(_Message, frozen=True, tag="leave"):
    """A goodbye: the next view must not contain the sender. `proof` is its signature that it leaves
    this view, the newest that it knows."""

    view: Digest = bytes(32)
    proof: Signature = b""


class TermsQuery(_Message, frozen=True, tag="terms?"):
    """A newcomer's request for what it must know of the run, which has only an invite yet."""


class Terms(_Message, frozen=True, tag="terms"):
    """The run's head, which names its terms and which its founder has signed, and the records of
    members, the sender's first (swarm/peer/admission.py)."""

    head: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_HEAD_BYTES)]
    records: Annotated[tuple[SealedRecord, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]


class StateQuery(_Message, frozen=True, tag="state?"):
    """A request for the snapshot that the receiver can serve. One that was taken before the end of
    `min_round` is of no use to the sender."""

    stream: Name
    min_round: Annotated[int, msgspec.Meta(ge=-1, le=2**62)] = -1


class StateOffer(_Message, frozen=True, tag="state"):
    """The sender's snapshot after `round` (-1: before the first), as a chunk that lists its chunks.
    `view` is the newest that the sender knows: a state belongs to one chain of views. Its streams
    lately had a round of `round_bytes` every `round_s` seconds; zeros if the sender knows none."""

    stream: Name
    view: Digest
    round: Annotated[int, msgspec.Meta(ge=-1, le=2**62)]
    state: Annotated[bytes, msgspec.Meta(max_length=32)]
    digest: Digest
    size: Size
    tokens: Count
    round_bytes: Count = 0
    round_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0


class EvaluationQuery(_Message, frozen=True, tag="evaluations?"):
    """A request for the run's last evaluations, of a visitor or of a member that is new."""


class Evaluated(_Message, frozen=True, tag="evaluated"):
    """Evaluations, each with its member: those that the sender knows, if this `answers` a query, or
    else its own new one. `sample` is a text that the weights of the last one wrote."""

    evaluations: Annotated[
        tuple[tuple[Name, Evaluation], ...], msgspec.Meta(max_length=MAX_EVALUATIONS)
    ]
    sample: Annotated[str, msgspec.Meta(max_length=MAX_SAMPLE_CHARS)] = ""
    answers: bool = False


class Measuring(_Message, frozen=True, tag="measuring"):
    """The sender measures the weights of this round through others' servers, and has done so much
    of it; 100 if it has ended, whatever came of it."""

    round: Count
    percent: Annotated[int, msgspec.Meta(ge=0, le=100)]


class Ping(_Message, frozen=True, tag="ping"):
    """A request for the run time; `sent_s` comes back unchanged."""

    sent_s: float


class Pong(_Message, frozen=True, tag="pong"):
    """The answer to a `Ping`: the sender's run time on its arrival."""

    sent_s: float
    run_s: float


# Calls (swarm/peer/calls.py). A payload is a sequence of chunks, none if it is empty. `inline`
# holds the bytes of its different chunks, in order, if they are few; a repeat leaves them out.
# A payload stays where it was made if both sides agree: then later calls name its holders.

Body = Annotated[bytes, msgspec.Meta(max_length=MAX_BODY_BYTES)]
PayloadChunk = tuple[Digest, Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_BYTES)]]
Payload = Annotated[tuple[PayloadChunk, ...], msgspec.Meta(max_length=MAX_PAYLOAD_CHUNKS)]
Payloads = Annotated[tuple[Payload, ...], msgspec.Meta(max_length=MAX_PAYLOADS)]
Inline = Annotated[
    tuple[Annotated[bytes, msgspec.Meta(max_length=MAX_INLINE_BYTES)], ...],
    msgspec.Meta(max_length=MAX_PAYLOADS),
]
PayloadHolders = Annotated[
    tuple[Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_HOLDERS)], ...],
    msgspec.Meta(max_length=MAX_PAYLOADS),
]
CallVerdict = Literal["ok", "full", "failed", "late", "missing"]


class Call(_Message, frozen=True, tag="call"):
    """A request, done once. Ids are unique in a sender's life. `holders` names the members that
    serve each payload; where it names none, the sender does. If `leave`, the answer's payloads may
    stay with the receiver."""

    id: Count
    request: Body
    payloads: Payloads = ()
    inline: Inline = ()
    holders: PayloadHolders = ()
    leave: bool = False


class Answer(_Message, frozen=True, tag="answer"):
    """The answer to call `id` of the receiver's life `incarnation`; only "ok" brings a result.
    "full": nothing was done, ask again. "failed": it cannot be done. "late": the payloads came too
    late, or the answer is gone. "missing": the named holders did not deliver the payloads whose
    places are the bytes of the body. If `left`, the payloads stay until `Heard`, as long as `Keep`
    renews their lease."""

    incarnation: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    id: Count
    verdict: CallVerdict
    body: Body = b""
    payloads: Payloads = ()
    inline: Inline = ()
    left: bool = False


class Heard(_Message, frozen=True, tag="heard"):
    """The sender has, or no longer wants, the answer to its call `id`."""

    id: Count


class Keep(_Message, frozen=True, tag="keep"):
    """The sender still wants the payloads that these calls left with the receiver."""

    ids: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_LEFT_IDS)]


# Branches (swarm/protocol/branches.py).


class BranchAsk(_Message, frozen=True, tag="branch?"):
    """A request to sign a branch that lists the receiver; its view has long had no quorum."""

    view: Value


class BranchSign(_Message, frozen=True, tag="branch"):
    """A signature of this branch; empty if the branch must begin at round `floor` or later."""

    digest: Digest
    proof: Signature = b""
    floor: Count = 0


# Returns (swarm/protocol/returns.py).


class HeldState(msgspec.Struct, frozen=True, array_like=True):
    """The state that a peer has: the first round that is not in it, its hash if all members' are
    equal, the run's agreed tokens, and the view of the last round in it (empty: none is). Of a
    whole model (`axis` 0), or of the stage on this axis (swarm/protocol/axes.py)."""

    first: Count
    state: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    tokens: Count = 0
    under: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    axis: Annotated[int, msgspec.Meta(ge=0, le=MAX_STAGES)] = 0


class Roll(_Message, frozen=True, tag="roll"):
    """From a key of a view that may have no quorum any more: the newest view that it knows, the
    stage that it would serve, and the states that it holds, of one axis each."""

    view: Digest
    stage: Annotated[int, msgspec.Meta(ge=-3, lt=MAX_STAGES)]
    held: Annotated[tuple[HeldState, ...], msgspec.Meta(max_length=MAX_HELD)] = ()


class ReturnAsk(_Message, frozen=True, tag="return?"):
    """A request to sign a return that lists the receiver's key in this life. `goodbyes` are those
    of members that it does not list, by their index in the view before."""

    view: Value
    goodbyes: Annotated[tuple[tuple[Count, Signature], ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class ReturnSign(_Message, frozen=True, tag="return"):
    """A signature of this return."""

    digest: Digest
    proof: Signature


class Lineage(_Message, frozen=True, tag="lineage"):
    """The sender's chain of views up to view `number`, and its agreed tokens as far as it knows.
    `trail` holds 8 bytes of each kept view's hash, oldest first; `views` are those that the
    receiver is missing, if it asked and has fewer tokens."""

    tokens: Count
    number: Count
    trail: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8 * MAX_TRAIL)]
    views: Annotated[tuple[Value, ...], msgspec.Meta(max_length=MAX_TRAIL)] = ()


ChunkMessage = Want | Piece | Miss | Probe | Probed
DataMessage = DataQuery | DataHeld
ContentMessage = Offer | Reduced | Holds
PaxosMessage = Prepare | Promise | Propose | Accepted | Rejected | Decided
LogMessage = LogQuery | Forgotten
PairMessage = PairPropose | PairAccept | PairRefuse | PairHave | PairCommit | PairAbort
ViewMessage = ViewQuery | Views | Join | Leave
IntroductionMessage = TermsQuery | Terms
SnapshotMessage = StateQuery | StateOffer
EvaluationMessage = EvaluationQuery | Evaluated | Measuring
TimeMessage = Ping | Pong
CallMessage = Call | Answer | Heard | Keep
BranchMessage = BranchAsk | BranchSign | Lineage
ReturnMessage = Roll | ReturnAsk | ReturnSign

Message = (
    ChunkMessage
    | ContentMessage
    | PaxosMessage
    | LogMessage
    | PairMessage
    | ViewMessage
    | SnapshotMessage
    | TimeMessage
    | CallMessage
    | Tally
    | Away
    | EvaluationMessage
    | Load
    | Reads
    | DataMessage
    | BranchMessage
    | ReturnMessage
    | IntroductionMessage
)
