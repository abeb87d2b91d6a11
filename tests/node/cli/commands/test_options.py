"""The options that `run` and `join` share."""

import click
import pytest
from click.testing import CliRunner

from farflock.node.assembly.checkpoints import KEPT
from farflock.node.cli.commands.options import logs_of, machine_of, machine_options
from farflock.node.errors import Usage
from farflock.node.model.device import Device
from farflock.node.sinks.choice import Endpoint, LogOptions


def given(*arguments):
    """The machine of these options, or what is said against them."""
    made = []

    @click.command()
    @machine_options
    def command(**options):
        made.append(machine_of(options))

    answer = CliRunner().invoke(command, arguments, catch_exceptions=False)
    return made[0] if made else answer.output


def test_without_options_the_last_checkpoints_are_kept_whatever_they_take():
    machine = given()
    assert (machine.keep, machine.keep_bytes, machine.disk) == (KEPT, None, None)


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GB", 20 * 10**9), ("1.5 tb", 1_500 * 10**9), ("500M", 500 * 10**6), ("1234", 1234)],
)
def test_sizes_are_written_as_people_write_them(text, size):
    assert given("--keep", "7", "--keep-bytes", text).keep_bytes == size
    assert given("--disk", text).disk == size


@pytest.mark.parametrize("text", ["lots", "-3GB", "0", "3 miles", "", "1e9", "nan", "9" * 99])
def test_what_is_no_size_is_refused_in_words(text):
    said = given("--keep-bytes", text)
    assert "is not a size; write it as in 20GB, 500MB or 1.5TB" in said


def test_a_node_trains_on_the_best_device_or_on_the_one_that_is_chosen(card):
    assert given().device.place == card
    assert given("--device", "cpu").device == Device()


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(Usage, match="--device tpu: that is not a device's name"):
        given("--device", "tpu")


def test_not_to_keep_any_checkpoint_is_refused():
    assert "0 is not in the range x>=1" in given("--keep", "0")


@pytest.mark.parametrize(("text", "size"), [("auto", None), ("1", 1), ("48", 48)])
def test_how_much_is_computed_at_once_is_a_number_or_the_devices_choice(text, size):
    assert given("--micro-batch", text).step_options.micro_batch == size
    assert given().step_options.micro_batch is None


@pytest.mark.parametrize("text", ["0", "-2", "few", "", "1.5", "9" * 99])
def test_what_is_no_number_of_sequences_is_refused_in_words(text):
    said = given("--micro-batch", text)
    assert "is not a number of sequences; write it as in 4, or auto" in said


def logged(*arguments):
    """Where measures go with these options, or what is said against them."""
    made = []

    @click.command()
    @machine_options
    def command(**options):
        made.append(logs_of(options))

    answer = CliRunner().invoke(command, arguments, catch_exceptions=False)
    return made[0] if made else answer.output


def test_measures_go_to_the_folder_alone_unless_more_is_asked_for():
    assert logged() == LogOptions()
    assert logged("--log", "tensorboard,wandb", "--log-every", "2", "--metrics", "9464") == (
        LogOptions(("tensorboard", "wandb"), Endpoint("127.0.0.1", 9464), 2.0)
    )


def test_measures_are_not_taken_more_often_than_the_status():
    assert "0.5 is not in the range 1<=x<=3600" in logged("--log-every", "0.5")


def test_an_unknown_place_for_measures_is_refused():
    with pytest.raises(Usage, match="did you mean 'tensorboard'"):
        logged("--log", "tensorbord")
