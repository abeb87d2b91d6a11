"""Adapters over bases that differ from peer to peer are one run, if all of them say so."""

from functools import partial

import pytest
import torch
from torch import nn
from worlds.virtual_optimizer import train_together

from farflock.node.errors import RefusedByRun, Usage
from farflock.node.run.tensor_list import list_tensors
from farflock.node.run.user_terms import fingerprint, founded, require_agreed, wish

torch.set_num_threads(1)
adamw = partial(torch.optim.AdamW, lr=1e-2)


class Adapted(nn.Module):
    """A frozen layer, in a type and with values of each peer's own, and what is added to it."""

    def __init__(self, rank):
        super().__init__()
        self.base = nn.Linear(8, 1).to((torch.float32, torch.bfloat16)[rank])
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            self.base.weight.fill_(0.5 + rank / 8)
            self.down.weight.fill_(0.1)
            self.up.weight.fill_(0.1)

    def forward(self, x):
        return self.base(x.to(self.base.weight.dtype)).float() + self.up(self.down(x))


def loss_of(rank, step):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * rank + step))
    return lambda model: (model(x) - x.sum(1, keepdim=True)).square().mean()


async def work(member):
    before = member.model.base.weight.clone()
    for step in range(6):
        await member.step(loss_of(member.rank, step))
    assert torch.equal(before, member.model.base.weight)
    return [member.model.down.weight.detach(), member.model.up.weight.detach()]


@pytest.mark.parametrize("frozen", ["any", "llama-3.2-1b"])
def test_adapters_over_unequal_bases_end_equal(frozen):
    ours, theirs = train_together(
        2, "diloco", Adapted, work, adamw, period=3, codec="fp32", frozen=frozen
    )
    assert all(map(torch.equal, ours, theirs))
    assert not torch.equal(ours[1], Adapted(0).up.weight)


def test_without_a_word_they_are_refused_with_the_first_tensor():
    with pytest.raises(RefusedByRun, match=r"parameter base\.weight is torch\.bfloat16 here"):
        train_together(2, "diloco", Adapted, work, adamw)


def wished(frozen, rank=0):
    model = Adapted(rank)
    listed = list_tensors(model, with_frozen=frozen is None)
    print_ = fingerprint(model, adamw(model.parameters()), listed)
    return wish(print_, "diloco", {}, {"frozen": frozen})


@pytest.mark.parametrize(("here", "run"), [(None, "any"), ("any", None), ("mine", "any")])
def test_a_joiner_that_says_another_name_is_told_both(here, run):
    says = f"frozen: it is {here!r} here and {run!r} in the run; give the run's"
    with pytest.raises(RefusedByRun, match=says):
        require_agreed(founded(wished(run)), wished(here))


def test_the_terms_of_others_do_not_name_it():
    assert b"frozen" not in founded(wished(None)).canonical()
    assert founded(wished("any")) == founded(wished("any", rank=1))


def test_what_is_not_text_is_refused():
    with pytest.raises(Usage, match=r"model\.frozen must be text"):
        founded(wished(True))
