"""Names from other programs lead to ours, and short counts become whole numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.errors import Usage
from farflock.node.run.manifest import simulated_default
from farflock.node.run.spelling import count_of


def refusal(*assignments):
    with pytest.raises(Usage) as error:
        simulated_default(assignments)
    return str(error.value)


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("train.learning_rate=1", "lr"),
        ("train.batch_size=1", "batch"),
        ("train.seq_len=1", "seq"),
        ("train.warmup=1", "warmup_tokens"),
        ("train.epochs=1", "run.total_tokens"),
        ("train.inner_steps=1", "method.options.period"),
        ("train.H=1", "method.options.period"),
        ("model.hidden_size=1", "dim"),
        ("model.n_layers=1", "layers"),
        ("exchange.compression=int8", "codec"),
    ],
)
def test_a_key_of_another_program_is_answered_by_ours(written, key):
    assert refusal(written).endswith(f"there is no such key; did you mean {key!r}?")


@pytest.mark.parametrize("name", ["H", "inner_steps", "local_steps"])
def test_an_option_of_another_program_is_answered_by_the_methods(name):
    said = refusal("method.name=diloco", f"method.options.{name}=3")
    assert said.endswith(f"there is no {name!r}; {name!r} is called 'period' here")


def test_a_method_without_that_option_names_its_own():
    assert "choose from" in refusal("method={name='ddp', options={H=3}}")


def test_adam_is_adamw_and_not_nadam():
    assert refusal("train.optimizer=adam").endswith("'adam' is not known; did you mean 'adamw'?")


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("1B", 10**9),
        ("1.5T", 1_500_000_000_000),
        ("500k", 500_000),
        ("2 M", 2_000_000),
        ("1_000", 1000),
        (1e9, 10**9),
        (7, 7),
    ],
)
def test_a_count_is_a_whole_number(written, number):
    assert count_of(written) == number


@pytest.mark.parametrize("written", ["", "M", "1Q", "-1M", "0.0001k", "1e", 1.5, float("inf"), [1]])
def test_what_is_not_a_count_is_left_to_be_reported(written):
    assert count_of(written) == written


@given(st.one_of(st.text(), st.floats(allow_nan=False), st.integers()))
def test_anything_at_all_is_read(written):
    count_of(written)
