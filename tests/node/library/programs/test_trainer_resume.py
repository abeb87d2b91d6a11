"""A Hugging Face `Trainer` resumes from its checkpoint: as the founder, or among others."""

import pytest
import torch
from torch import nn
from worlds.virtual_optimizer import alone

import farflock

pytestmark = pytest.mark.net  # not of the network, but transformers takes seconds to load

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

torch.set_num_threads(1)
STEPS, SAVED, PERIOD = 6, 4, 3  # the checkpoint is inside of a period


class Line(nn.Module):
    """A model in the trainer's form: it returns its loss."""

    def __init__(self, value=0.0):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        for entry in self.parameters():
            nn.init.constant_(entry, value)

    def forward(self, x, labels=None):
        return {"loss": (self.layer(x).squeeze(1) - labels).square().mean()}


def rows():
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.sum()} for row in x]


def weights(model):
    return [entry.detach().clone() for entry in model.parameters()]


def trainer_of(model, optimizer, folder, steps=STEPS):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=0.1,
        save_steps=SAVED,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return Trainer(model, arguments, train_dataset=rows(), optimizers=(optimizer, None))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, and the weights and the rate at the end of the run that wrote it."""
    folder, model = tmp_path_factory.mktemp("first"), Line()
    optimizer = alone(model, lr=0.1, period=PERIOD)
    trainer = trainer_of(model, optimizer, folder)
    trainer.train()
    rate = trainer.lr_scheduler.get_last_lr()
    optimizer.close(patient=False)
    return folder / f"checkpoint-{SAVED}", weights(model), rate


def test_a_founder_goes_on_as_if_it_had_never_stopped(saved, tmp_path):
    checkpoint, expected, rate = saved
    model = Line(value=9.0)
    optimizer = alone(model, lr=0.1, period=PERIOD)
    trainer = trainer_of(model, optimizer, tmp_path)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert all(map(torch.equal, weights(model), expected))
    assert trainer.lr_scheduler.get_last_lr() == rate
    assert optimizer.tokens == STEPS
    optimizer.close(patient=False)


@pytest.mark.filterwarnings("ignore")
def test_a_joiner_takes_the_moments_of_its_checkpoint_and_the_weights_of_the_run(saved, tmp_path):
    checkpoint = saved[0]

    def work(rank, optimize):
        model = Line(value=5.0)
        optimizer = optimize(model, lr=0.01)
        if rank == 1:
            trainer_of(model, optimizer, tmp_path).train(resume_from_checkpoint=str(checkpoint))
        else:
            for row in rows()[: STEPS - SAVED]:
                optimizer.zero_grad()
                model(row["x"][None], row["labels"])["loss"].backward()
                optimizer.step()
        steps = {int(state["step"]) for state in optimizer.state.values()}
        optimizer.finish()
        return weights(model), steps

    with farflock.local_swarm(2, "diloco", period=50, view_s=1.0) as swarm:
        (first, own), (second, restored) = swarm.train(work)
    assert all(map(torch.equal, first, second))
    assert all(bool((x > 4).all()) for x in first)  # nobody was dragged to the checkpoint
    # the first gradients are of the checkpoint's weights: they are dropped
    assert (own, restored) == ({STEPS - SAVED}, {STEPS - 1})
