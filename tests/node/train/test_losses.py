"""Losses are reported once, in order, and read late if a device still computes them."""

from farflock.node.train.losses import Losses


class Computing:
    """A loss on a device, and how often it was waited for."""

    def __init__(self, value):
        self.value, self.waits = value, 0

    def __float__(self):
        self.waits += 1
        return self.value


class Told:
    def __init__(self):
        self.losses, self.seen = Losses(), []

    def report(self, kind, fields):
        assert kind == "step"
        self.seen.append((fields["step"], fields["loss"]))

    def ended(self, step, loss):
        self.losses.step_ended(step, loss, self.report)


def test_a_number_is_reported_at_once():
    told = Told()
    assert told.losses.last is None
    for step, loss in enumerate((3.0, 2.0), 1):
        told.ended(step, loss)
        assert told.seen[-1] == (step, loss)
        assert told.losses.last == loss
    told.losses.tell(told.report)
    assert told.seen == [(1, 3.0), (2, 2.0)]


def test_what_a_device_computes_is_read_once_in_training_and_reported_when_the_next_step_ends():
    told, first, second = Told(), Computing(3.0), Computing(2.0)
    told.ended(1, first)
    told.losses.tell(told.report)
    assert (told.seen, told.losses.last, first.waits) == ([], None, 0)
    told.losses.read()
    assert (told.seen, told.losses.last, first.waits) == ([], 3.0, 1)
    told.ended(2, second)
    assert (told.seen, first.waits, second.waits) == ([(1, 3.0)], 1, 0)
    assert told.losses.last == 3.0, "a status must not wait for the device"
    told.losses.read()
    told.losses.read()
    told.losses.tell(told.report)
    told.losses.tell(told.report)
    assert told.seen == [(1, 3.0), (2, 2.0)]
    assert (told.losses.last, second.waits) == (2.0, 1)
