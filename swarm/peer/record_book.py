"""The signed records that a peer has come across: its own, and the newest of each other peer."""

from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.record import BadRecord, Record, newer, unseal
from farflock.swarm.roles import EVERY, stage_of

MAX_KNOWN = 1024


class RecordBook:
    """The newest record of each known peer; what is learnt goes to the links too."""

    def __init__(self, port: PeerContext) -> None:
        self.records: dict[PeerId, Record] = {}  # of others
        self.mine = b""  # my own, sealed: what `Join` carries
        self._port = port

    def learn(self, blob: bytes) -> Record | None:
        """Take in a signed record, whatever its source; return it if it is good and new."""
        try:
            record = unseal(blob, self._port.run)
        except BadRecord:
            self._port.drop("bad record")
            return None
        known = self.records.get(record.peer)
        if record.peer == self._port.me:
            return None  # the directory still has one that I have replaced
        if not newer(record, known) or (known is None and len(self.records) >= MAX_KNOWN):
            return None
        self.records[record.peer] = record
        self._port.links.learn(blob)
        return record

    def my_stage(self) -> int:
        """The stage that my record says I serve."""
        return stage_of(unseal(self.mine, self._port.run).role) if self.mine else EVERY

    def others(self) -> list[PeerId]:
        """The other members of the newest view, or before I know a view, peers that I know."""
        chain = self._port.chain
        peers = chain.newest.peers if chain else tuple(self.records)[:MAX_MEMBERS]
        return [peer for peer in peers if peer != self._port.me]
