"""A Hugging Face `Trainer` logs the measures of its swarm in all its loggers."""

import importlib.util

import pytest
import torch
from torch import nn

import farflock
from farflock.node.library.local_swarm import _LocalDoor
from farflock.node.library.swarm_optimizer import SwarmOptimizer
from farflock.node.sinks.measures import NAMES

pytestmark = pytest.mark.net

pytest.importorskip("transformers")
for needed in ("accelerate", "tensorboard"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"pip install -c constraints.txt {needed}", allow_module_level=True)

STEPS, EVERY = 6, 2
KNOWN_BETTER = ("time_s", "step", "loss")
OURS = {name for name in NAMES if name not in KNOWN_BETTER and "evaluation" not in name}


class Line(nn.Module):
    """A model in the trainer's form: it returns its loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x, labels=None):
        return {"loss": (self.layer(x).squeeze(1) - labels).square().mean()}


def rows():
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.sum()} for row in x]


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A trainer whose run is over, and what its optimizer measured last."""
    from transformers import Trainer, TrainingArguments

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        logging_steps=EVERY,
        save_strategy="no",
        report_to=["tensorboard"],
        use_cpu=True,
        disable_tqdm=True,
    )
    model = Line()
    with farflock.local_swarm(1) as swarm:
        terms = {"period": 2, "tokens_per_step": 8, "lr": 0.01}
        with SwarmOptimizer(model, "diloco", _LocalDoor(swarm, 0), **terms) as optimizer:
            trainer = Trainer(model, arguments, train_dataset=rows(), optimizers=(optimizer, None))
            optimizer.log_to(trainer)
            trainer.train()
            measured = optimizer.measures()
        assert optimizer.measures() == {}
        trainer.log({"later": 1.0})
    return trainer, measured


def test_its_history_and_tensorboard_have_them_beside_its_own(trained, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer, measured = trained
    first, *_ = logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert set(measured) == OURS
    assert first.keys() > OURS
    assert [entry["step"] for entry in logged] == [2, 4, 6]
    assert [entry["tokens"] for entry in logged] == [16, 32, 48]
    assert logged[-1]["peers"] == 1
    seen = EventAccumulator(str(tmp_path / "events"))
    seen.Reload()
    for name in ("tokens", "sent_bytes", "busy_share", "rounds_ok", "rounds_alone"):
        found = [(entry.step, entry.value) for entry in seen.Scalars(f"train/{name}")]
        assert found[:3] == [(entry["step"], pytest.approx(entry[name])) for entry in logged]


def test_after_the_swarm_nothing_is_added(trained):
    trainer, _ = trained
    assert not OURS & trainer.state.log_history[-1].keys()
