"""What a member may claim in a round stands in the manifest, and follows from the run's terms."""

import pytest

from farflock.node.errors import RefusedByRun, Usage
from farflock.node.run.entitled import (
    FAST,
    MAX_TOKENS_OF_USERS,
    entitlement_of,
    entitlement_of_users,
)
from farflock.node.run.manifest import demo_manifest, parse, resolve
from farflock.node.run.user_terms import founded
from farflock.optimizers.catalog import method
from farflock.swarm.messages import MAX_OFFERED_TOKENS
from farflock.swarm.protocol.entitlement import Entitlement

STEP = 8 * 64  # tokens, in a demo


def entitled(name, **options):
    plan = demo_manifest("diloco", 2, 1000).plan()
    return entitlement_of(plan, STEP, method(name, **options))


@pytest.mark.parametrize(("name", "steps"), [("diloco", 10), ("ddp", 1)])
def test_by_default_a_member_may_claim_a_multiple_of_what_a_round_takes(name, steps):
    manifest = demo_manifest(name, 2, 1000)
    assert manifest.exchange.max_tokens_per_round == FAST * STEP * steps
    assert parse(manifest.canonical()) == manifest


def test_a_stage_server_may_claim_a_multiple_of_its_stages_whole_batch():
    table = {"model": {"tied": False}, "train": {"batch": 2, "seq": 16}}
    manifest = resolve(table | {"pipeline": {"stages": 2, "batch": 5}})
    assert manifest.exchange.max_tokens_per_round == FAST * 5 * 2 * 16


@pytest.mark.parametrize("number", [0, -1, MAX_OFFERED_TOKENS + 1])
def test_a_number_that_no_offer_can_have_is_refused(number):
    with pytest.raises(Usage, match=r"exchange\.max_tokens_per_round must be a whole number"):
        resolve({"exchange": {"max_tokens_per_round": number}})


def test_a_joiner_refuses_a_run_that_does_not_say_what_its_members_may_claim():
    text = demo_manifest("diloco", 2, 100).canonical().decode()
    lines = [line for line in text.splitlines(True) if "max_tokens_per_round" not in line]
    with pytest.raises(RefusedByRun, match=r"exchange\.max_tokens_per_round.*it is missing"):
        parse("".join(lines))


def test_a_founders_number_is_that_of_all_members():
    given = {"exchange": {"max_tokens_per_round": 4096}, "method": {"name": "diloco"}}
    plan = resolve(given).plan()
    made = method(plan.method, **plan.options)
    assert entitlement_of(plan, STEP, made) == Entitlement(4096)


def test_a_weight_is_bounded_by_what_it_counts_and_else_by_one():
    tokens = 10 * FAST * STEP
    assert entitled("diloco") == Entitlement(tokens, 0.0)
    assert entitled("diloco", weights="steps") == Entitlement(tokens, 10 * FAST)
    assert entitled("diloco", weights="tokens") == Entitlement(tokens, tokens)
    assert entitled("ddp") == Entitlement(tokens, 10 * FAST)


def test_in_a_program_of_a_users_own_a_step_may_have_any_number_of_tokens():
    wished = {
        "run": {},
        "user_model": {"tensors": 1, "numbers": 1, "sha256": "0" * 64, "inner": "SGD"},
        "method": {"name": "diloco", "options": {"period": 5}},
        "exchange": {},
    }
    terms = founded(wished)
    assert terms.exchange.max_tokens_per_round == MAX_TOKENS_OF_USERS
    assert entitlement_of_users(None, terms.build()) == Entitlement(MAX_TOKENS_OF_USERS)
    steps = method("diloco", period=5, weights="steps")
    assert entitlement_of_users(1000, steps) == Entitlement(1000, 5 * FAST)
