"""The state of a trainer's microbatches: rounds name them, name them twice, or leave them out."""

from farflock.node.pipeline.trainer.commits import REMEMBERED, CommitTracker, DuplicateDetector


def test_its_own_numbers_are_told_and_what_a_stage_names_twice_is_counted():
    detector = DuplicateDetector("me", 2)
    assert detector.of_round(0, [("me", 1), ("you", 2), ("me", 3)]) == [1, 3]
    assert detector.of_round(1, [("me", 1)]) == [1]
    assert detector.of_round(0, [("you", 2)]) == []
    assert detector.doubled == 0, "another stage, and another trainer"
    assert detector.of_round(0, [("me", 3), ("me", 1), ("me", 4)]) == [3, 1, 4]
    assert detector.doubled == 2


def test_only_the_last_numbers_are_remembered():
    detector = DuplicateDetector("me", 1)
    detector.of_round(0, [("me", number) for number in range(2 * REMEMBERED + 1)])
    detector.of_round(0, [("me", 0), ("me", REMEMBERED)])
    assert detector.doubled == 0, "the numbers before the last ones are forgotten"
    detector.of_round(0, [("me", REMEMBERED + 1), ("me", 2 * REMEMBERED)])
    assert detector.doubled == 2, "the last ones are not"


class Heard:
    """The rounds of two stages as a trainer hears of them; a test writes the next ones."""

    stages = 2

    def __init__(self):
        self.next_named, self.next_skipped, self.next_left, self.left_out = [], [], [], []

    def named(self):
        yield from self.next_named
        self.next_named = []

    def skipped(self):
        return self.next_skipped.pop() if self.next_skipped else None

    def left(self):
        yield from self.next_left
        self.next_left = []


class Tracked:
    """A tracker of trainer `me`, with microbatches on their way through both stages."""

    def __init__(self, *numbers):
        self.stage_directory, self.events = Heard(), []
        report = lambda kind, fields: self.events.append((kind, fields))  # noqa: E731
        self.sizes = []
        heard = lambda stage, size: self.sizes.append((stage, size))  # noqa: E731
        self.commits = CommitTracker("me", self.stage_directory, report, heard=heard)
        for number in numbers:
            self.commits.begin(number, (0, 1), 10.0)

    def bind(self, number, stage):
        ledger, place = self.commits.ledger, (number, stage)
        assert ledger.replied(place, "server/1", ledger.send(place, "server/1"))

    def name(self, *numbers, stages=(0, 1)):
        self.stage_directory.next_named += [
            (stage, [("me", number) for number in numbers]) for stage in stages
        ]
        return self.commits.hear(12.5)


def test_what_all_stages_name_is_over_and_counts():
    one = Tracked(3, 4)
    assert one.name(3, stages=(0,)) == []
    assert one.name(3, stages=(1,)) == [3]
    assert one.events == [("microbatch", {"number": 3, "took_s": 2.5})]
    assert (one.commits.finished, list(one.commits.begun_s)) == (1, [4])


def test_it_tells_how_many_microbatches_each_round_names_also_of_other_trainers():
    one = Tracked(3)
    one.stage_directory.next_named += [(1, [("me", 3), ("you", 3)]), (0, [])]
    one.commits.hear(12.5)
    assert one.sizes == [(1, 2), (0, 0)]


def test_what_a_stage_leaves_out_is_over_and_does_not_count():
    one = Tracked(3)
    one.stage_directory.left_out += [(1, ("me", 3)), (1, ("you", 3)), (1, ("me", 9))]
    assert one.name(3) == [3]
    assert one.events == [("dropped", {"number": 3, "stage": 1})]
    assert (one.commits.finished, one.commits.dropped) == (0, 1)
    assert one.commits.late_begun_s == [10.0]
    assert one.stage_directory.left_out == []
    one.commits.hear(13.0)
    assert one.commits.late_begun_s == [], "it is told once"


def test_of_what_waits_for_rounds_that_were_missed_it_is_not_known_whether_it_counts():
    one = Tracked(3, 4)
    one.bind(3, 1)
    one.stage_directory.next_skipped.append(1)
    one.stage_directory.next_left.append((1, "server/1"))
    assert one.name(3, stages=(0,)) == [3]
    assert one.commits.lost == 1
    assert one.commits.ledger.phase((4, 1)) == "open", "it was not asked for yet"


def test_what_a_server_took_with_it_is_open_again():
    one = Tracked(3)
    one.bind(3, 1)
    one.stage_directory.next_left.append((1, "server/1"))
    assert one.name() == []
    assert one.commits.ledger.phase((3, 1)) == "open"


def test_what_is_dropped_after_it_is_over_is_reported_and_not_kept():
    one = Tracked(3)
    assert one.name(3) == [3]
    one.commits.drop(3, 0)
    assert one.events[-1] == ("dropped", {"number": 3, "stage": 0})
    one.commits.begin(3, (0, 1), 20.0)
    assert one.name(3) == [3]
    assert one.commits.finished == 2
