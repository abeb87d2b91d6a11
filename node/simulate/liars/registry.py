"""All liars by name."""

from collections.abc import Mapping

from farflock.node.simulate.liars import ballots, claims, lines
from farflock.node.simulate.liars.liar import Liar

LIARS: Mapping[str, type[Liar]] = {
    "hijack": lines.Hijacker,
    "void": claims.ForgedDecisions,
    "tokens": claims.ClaimsTokens,
    "weight": claims.ClaimsWeight,
    "evict-by-proposal": ballots.EvictsAll,
    "far-views": ballots.FarViews,
    "needless-views": ballots.NeedlessViews,
    "far-floors": ballots.FarFloors,
    "far-ballots": ballots.FarBallots,
    "early-ballots": ballots.EarlyBallots,
    "two-faced": ballots.TwoFaced,
    "two-values": ballots.TwoValues,
    "ignored-promises": ballots.IgnoresPromises,
    "void-lists": ballots.VoidLists,
    "empty-lists": ballots.EmptyLists,
    "endless-lists": ballots.EndlessLists,
    "mute": ballots.Mute,
    "withheld": claims.Withholds,
    "false-start": claims.FalseStart,
    "false-states": claims.FalseStates,
    "stale-views": lines.StaleViews,
    "forged-views": lines.ForgedViews,
    "replays": lines.Replays,
    "hidden-offers": claims.HidesOffers,
}

_OPENS_VIEWS = (
    "a decision on a view that nobody wants stays open; through a partition its turns drift apart,"
    " and the next view waits for minutes"
)
# Left out of disasters, each with the reason.
NOT_MIXED: Mapping[str, str] = {
    "two-faced": "it may bring two sides of a split to two results of a round, and the watch over a"
    " disaster knows no fork that is healed (tests/adversaries/test_forks.py does)",
    "two-values": "an honest proposer and its judges choose differently between the two",
    "evict-by-proposal": _OPENS_VIEWS,
    "far-views": _OPENS_VIEWS,
    "needless-views": _OPENS_VIEWS,
}
MIXED = tuple(name for name in LIARS if name not in NOT_MIXED)
