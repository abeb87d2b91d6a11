"""A callback that lets a Hugging Face `Trainer` log the measures of its swarm.

Importing this module loads transformers.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

Measure = Callable[[], dict[str, float]]


class SwarmCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Adds measures to whatever the trainer logs. It comes before the trainer's loggers."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure

    def on_log(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        logs: dict[str, Any] | None = None,
        **more: Any,  # noqa: ANN401 - transformers'
    ) -> None:
        """Add the measures of this moment to `logs` and to the trainer's history of them."""
        found = self._measure()
        for entry in (logs, *state.log_history[-1:]):
            if entry is not None:
                entry.update(found)


def add_to(trainer: "Trainer", measure: Measure) -> None:
    """Let a trainer log these measures, in all its loggers."""
    # `Trainer(callbacks=...)` and `add_callback` put one behind the loggers, which see it too late.
    trainer.callback_handler.callbacks.insert(0, SwarmCallback(measure))
