"""Loops of other packages beside a plain one, in a local swarm of two: what the examples do not
show. One thread uses a package, as packages keep state of the whole process."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

import farflock

pytestmark = pytest.mark.net  # the packages take seconds to load

torch.set_num_threads(1)
STEPS, PERIOD, BATCH = 12, 3, 4


def net():
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
    with torch.no_grad():
        for number, entry in enumerate(model.parameters()):
            entry.copy_(torch.linspace(-1, 1 + number, entry.numel()).view_as(entry))
    return model


def rows(rank, count=STEPS * BATCH):
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(rank))


def loss_of(model, x):
    return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))


def weights(model):
    return [entry.detach().float().clone() for entry in model.parameters()]


def ends_equal(work, model_of=net, steps=STEPS):
    """Check that a rank whose loop is `work(model, optimizer, rows)` and one with a plain loop end
    equal."""

    def of_rank(rank, optimize):
        model = model_of()
        optimizer = optimize(model, lr=1e-2)
        if rank:
            work(model, optimizer, rows(rank))
        else:
            for x in rows(rank, steps * BATCH).split(BATCH):
                optimizer.zero_grad()
                loss_of(getattr(model, "net", model), x).backward()
                optimizer.step()
        optimizer.finish()
        return optimizer.last_round, weights(model)

    with farflock.local_swarm(2, "diloco", period=PERIOD, codec="int8", view_s=1.0) as swarm:
        (rounds, ours), (_, theirs) = swarm.train(of_rank)
    assert all(map(torch.equal, ours, theirs))
    assert not all(map(torch.equal, ours, weights(net())))
    assert rounds.peers == 2


@pytest.mark.filterwarnings("ignore")
def test_lightning_s_manual_optimization():
    lightning = pytest.importorskip("lightning", reason="`make compat` installs it")

    class Sums(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.swarm = net(), None
            self.automatic_optimization = False

        def training_step(self, batch, number):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss_of(self.net, batch))
            optimizer.step()

        def configure_optimizers(self):
            return self.swarm

    def work(module, optimizer, numbers):
        module.swarm = optimizer
        trainer = lightning.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = torch.utils.data.DataLoader(numbers.view(STEPS, BATCH, 8), batch_size=None)
        trainer.fit(module, loader)

    ends_equal(work, Sums)


@pytest.mark.filterwarnings("ignore")
def test_accelerate_accumulates_in_bf16_and_saves_and_loads_its_state(tmp_path, monkeypatch):
    accelerate = pytest.importorskip("accelerate", reason="`make compat` installs it")
    # the process has one state, and a trainer of another test may have made it
    monkeypatch.setattr(accelerate.state.AcceleratorState, "_shared_state", {})

    def work(model, optimizer, numbers):
        accelerator = accelerate.Accelerator(
            mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True
        )
        loader = torch.utils.data.DataLoader(numbers, batch_size=BATCH)
        model, prepared, loader = accelerator.prepare(model, optimizer, loader)
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                prepared.step()
                prepared.zero_grad()
        accelerator.save_state(str(tmp_path))
        saved = torch.load(tmp_path / "optimizer.bin", weights_only=True)
        assert saved["swarm"]["step"] == STEPS // 2
        before = weights(model)
        accelerator.load_state(str(tmp_path))
        assert all(map(torch.equal, before, weights(model)))

    ends_equal(work, steps=STEPS // 2)


class Loss(nn.Module):
    """The model in a trainer's form: it returns its loss."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, labels=None):
        return {"loss": (self.net(x).squeeze(1) - labels).square().mean()}


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_accumulates_clips_follows_a_schedule_and_saves(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    def work(model, optimizer, numbers):
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=STEPS // 2,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            save_steps=PERIOD,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        data = [{"x": row, "labels": row.sum()} for row in numbers]
        schedule = LinearLR(optimizer, 0.1, total_iters=STEPS // 2)
        Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule)).train()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2)
        written = tmp_path / f"checkpoint-{PERIOD}" / "optimizer.pt"
        assert torch.load(written, weights_only=True)["swarm"]["step"] == PERIOD

    ends_equal(work, Loss, STEPS // 2)
