"""The tasks that a world starts for its peers, and the errors that ended them."""

import asyncio


class Spawner:
    """A starter of tasks; `failures` are the exceptions that ended any of them."""

    def __init__(self, failures=None):
        self.tasks = set()
        self.failures = [] if failures is None else failures

    def spawn(self, work):
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.ended)

    def ended(self, task):
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.failures.append(task.exception())
