"""A loop in its own thread: calls into it, what ends it, and how errors and Ctrl-C come through."""

import asyncio
import contextlib
import gc
import signal
import threading
import weakref

import pytest
from worlds.waiting import LIMIT_S

from farflock.node.errors import Failure
from farflock.node.library.background import Background, in_threads

pytestmark = pytest.mark.net

SOON_S = 0.3


@pytest.fixture
def background():
    made = Background("background")
    yield made
    made.close()
    assert not made.thread.is_alive()


class Room:
    """A context that notes how it was left."""

    def __init__(self, fault=None):
        self.fault, self.left, self.owner = fault, threading.Event(), None

    @contextlib.asynccontextmanager
    async def __call__(self):
        if self.fault is not None:
            raise self.fault
        self.owner = asyncio.current_task()
        try:
            yield self
        finally:
            self.left.set()


async def give(value):
    await asyncio.sleep(0)
    return value


async def fail(error):
    await asyncio.sleep(0)
    raise error


def test_a_call_runs_in_the_other_thread_and_gives_its_result(background):
    life = background.enter(Room())

    async def where():
        return threading.current_thread()

    assert life.call(where) is background.thread
    assert life.call(lambda: give(7)) == 7


def test_an_error_of_a_call_is_raised_and_ends_nothing(background):
    life = background.enter(Room())
    with pytest.raises(ValueError, match="seven"):
        life.call(lambda: fail(ValueError("seven")))
    assert life.call(lambda: give(8)) == 8


def test_an_error_on_the_way_in_is_raised_as_it_is(background):
    with pytest.raises(ValueError, match="door"):
        background.enter(Room(ValueError("door")))


def test_the_end_leaves_the_context_and_later_calls_say_so(background):
    room = Room()
    life = background.enter(room)
    life.end()
    assert room.left.is_set()
    with pytest.raises(Failure, match="closed"):
        life.call(lambda: give(1))
    life.end()


def test_what_is_under_way_hears_of_the_end(background):
    life, begun, heard = background.enter(Room()), threading.Event(), threading.Event()

    async def wait_long():
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            heard.set()

    def call():
        with pytest.raises(Failure, match="closed"):
            life.call(wait_long)

    caller = threading.Thread(target=call)
    caller.start()
    assert begun.wait(LIMIT_S)
    life.end()
    caller.join(LIMIT_S)
    assert heard.is_set()
    assert not caller.is_alive()


def test_a_context_that_breaks_is_the_cause_of_the_error_of_the_next_call(background):
    @contextlib.asynccontextmanager
    async def fragile():
        try:
            yield asyncio.current_task()
        except asyncio.CancelledError:
            raise OSError(5, "the line is gone") from None

    life = background.enter(fragile)

    async def break_it():
        life.value.cancel()
        await asyncio.sleep(3600)

    with pytest.raises(Failure, match="the line is gone") as caught:
        life.call(break_it)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(Failure, match="the line is gone"):
        life.call(lambda: give(1))


@pytest.mark.parametrize("through", [True, False])
def test_ctrl_c_ends_the_wait_and_the_call_only_unless_it_must_go_through(background, through):
    life, ended = background.enter(Room()), []

    async def work():
        asyncio.get_running_loop().call_later(
            SOON_S, signal.pthread_kill, threading.main_thread().ident, signal.SIGINT
        )
        try:
            await asyncio.sleep(2 * SOON_S if through else 3600)
            ended.append("whole")
        except asyncio.CancelledError:
            ended.append("cut")
            raise

    with pytest.raises(KeyboardInterrupt):
        life.call(work, through=through)
    life.call(lambda: asyncio.sleep(0))
    assert ended == ["whole" if through else "cut"]


@pytest.fixture
def ctrl_c(monkeypatch):
    """Let Ctrl-C come at the earliest: the loop has the call, and its caller no future yet."""
    submit = asyncio.run_coroutine_threadsafe

    def interrupted(coroutine, loop):
        submit(coroutine, loop)
        raise KeyboardInterrupt

    def call(life, work, **options):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
            life.call(work, **options)

    return call


def test_a_call_that_goes_through_is_waited_for_after_a_second_ctrl_c_too(background, ctrl_c):
    life, go_on, ended = background.enter(Room()), asyncio.Event(), []

    async def work(name):
        await go_on.wait()
        ended.append(name)

    for name, through in (("first", True), ("cut", False), ("second", True)):
        ctrl_c(life, lambda name=name: work(name), through=through)
    background.run(go_on.set)
    life.call(lambda: asyncio.sleep(0))
    assert ended == ["first", "second"]


def test_the_error_of_a_call_that_went_through_is_raised_by_the_next_one(background, ctrl_c):
    life, go_on = background.enter(Room()), asyncio.Event()

    async def work():
        await go_on.wait()
        raise ValueError("seven")

    ctrl_c(life, work, through=True)
    background.run(go_on.set)
    with pytest.raises(ValueError, match="seven"):
        life.call(lambda: give(8))
    assert life.call(lambda: give(8)) == 8


def test_closing_the_thread_ends_its_lives(background):
    room = Room()
    life = background.enter(room)
    background.close()
    assert room.left.is_set()
    with pytest.raises(Failure, match="closed"):
        life.call(lambda: give(1))
    background.close()


def test_a_thread_can_be_asked_to_close_from_inside(background):
    life = background.enter(Room())

    async def close():
        background.close()
        life.end()

    with contextlib.suppress(Failure):
        life.call(close)
    background.thread.join(LIMIT_S)
    assert not background.thread.is_alive()


def test_a_life_keeps_nothing_of_its_calls(background):
    class Big:
        pass

    life, big = background.enter(Room()), Big()
    seen = weakref.ref(big)
    life.call(lambda big=big: give(id(big)))
    del big
    life.call(lambda: give(0))
    gc.collect()
    assert seen() is None


def test_threads_give_their_results_in_order():
    assert in_threads(4, lambda number: number * number, lambda: None) == [0, 1, 4, 9]


def test_the_first_error_makes_the_others_give_up_and_is_raised():
    told = threading.Event()

    def work(number):
        if number == 2:
            raise ValueError("two")
        assert told.wait(LIMIT_S)
        raise Failure("told", "to give up", "")

    with pytest.raises(ValueError, match="two"):
        in_threads(3, work, told.set)
