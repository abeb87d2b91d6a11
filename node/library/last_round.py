"""The steps of a program that are in no round: they are counted, said when it ends, and on wish a
last round takes them in."""

import math
from dataclasses import dataclass, field

from farflock.node.library.presence import ExternalStep, OptimizerNode
from farflock.node.library.telling import tell
from farflock.node.train.ending import drain
from farflock.optimizers.method import Result

MAX_EMPTY_STEPS = 20_000  # a method whose rounds depend on the time may never ask for one
ROUNDS = 2  # the first may have been decided already, without this peer


@dataclass(slots=True)
class OwnSteps:
    """This program's steps, as far as they are known to be in a round with others."""

    begins: int = 0  # the step of the loop at which this life of the program began
    made: int = 0  # steps since then up to the last one that trained
    shared: int = 0  # of these, up to the last one that a round has taken
    rounded: int = 0  # of these, up to the last one whose round is over, whatever came of it
    company: bool = False  # others have been there
    _said: bool = False
    _asked_since: list[int] = field(default_factory=list)  # rounds asked for after the last step

    def stepped(self, step: int, members: int) -> None:
        """Count a step that trained."""
        self.made, self.company = step - self.begins, self.company or members > 1
        self._asked_since.clear()

    async def counted(self, result: Result, step: int) -> None:
        """Note the result of an exchange that was asked for at this step of the loop."""
        step -= self.begins  # an exchange of the last life has none of these
        if result.taken and len(result.participants) > 1:
            self.company, self.shared = True, max(self.shared, min(step, self.made))
        self.rounded = max(self.rounded, min(step, self.made))
        if step >= self.made:
            self._asked_since.append(step)

    @property
    def alone(self) -> int:
        """The number of steps that are in no round."""
        return self.made - self.shared

    @property
    def is_done(self) -> bool:
        """True once nothing is left for a round, or several have not taken it."""
        return not self.alone or len(self._asked_since) >= ROUNDS

    def tell_of_tokens(self, tokens: int) -> None:
        """Warn once, after the first round with others, of steps that still count as one token."""
        if self.shared and tokens == 1 and not self._said:
            self._said = True
            tell(
                "each step of this program counts as 1 token in the run's progress, which is the"
                " default; pass tokens_per_step, or set optimizer.tokens_per_step before a step"
            )

    def tell(self) -> None:
        """Warn of steps that stay this program's own, though others were there."""
        if not (self.company and self.alone):
            return
        which = f"the last {self.alone} of {self.made}" if self.shared else f"all {self.made}"
        tell(
            f"{which} steps are in no round with the other members, so they changed this model"
            " alone; call optimizer.finish() before it closes, or choose a shorter period"
        )


def run_steps(here: OptimizerNode, own: OwnSteps) -> int:
    """Return how many steps a peer has made that was there from the beginning: whole rounds times
    their period, plus this peer's steps since."""
    driver = here.loop.driver
    if not driver.streams:
        return own.made
    template = driver.streams[0]
    newest = driver.position.rounds[template.key.stream]
    period = getattr(driver.method, "period", 1)
    return (newest + 1) * period // template.stride + own.made - own.rounded


async def finish(here: OptimizerNode, own: OwnSteps, task: ExternalStep, timeout_s: float) -> None:
    """Go on to the method's next round with steps that have no gradients and change nothing, until
    that round has taken what the last steps did.

    A method that sends the gradients themselves (ddp) has a round in each step: it only waits."""
    loop = here.loop
    method = loop.driver.method
    tokens, task.tokens_per_step = task.tokens_per_step, 0
    try:
        await drain(loop, timeout_s)
        for _ in range(
            MAX_EMPTY_STEPS if loop.driver.streams and not method.keeps_gradients else 0
        ):
            if own.is_done or here.peer.alone:
                break
            progress = await loop.begin_step()
            await loop.compute(lambda: loop.driver.local_step(progress))  # noqa: B023 - it is awaited
            await loop.end_step(math.nan)
        await drain(loop, timeout_s)
    finally:
        task.tokens_per_step = tokens
