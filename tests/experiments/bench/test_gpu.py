"""The GPU benchmark: what it reckons, and its loops on the double of a device."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from farflock.experiments.bench import gpu
from farflock.experiments.bench.round import METHODS
from farflock.experiments.bench.workers.device_training import measured, product_flops
from farflock.experiments.bench.workers.round_member import Member, Settings
from farflock.experiments.measure.metric import NotMeasured
from farflock.node.model.device import Device, choose
from farflock.node.model.llama import PRESETS


def test_without_a_device_nothing_is_measured(quick):
    with pytest.raises(NotMeasured, match="no device here beside the CPU"):
        next(gpu.run(quick(device="cpu")))


def test_a_token_takes_six_operations_a_weight_and_those_of_attention():
    model = PRESETS["tiny"]
    assert gpu.flops_a_token(model, 16) == 6 * model.parameters() + 12 * 2 * 24 * 16


def test_the_shares_are_of_what_products_of_matrices_reach():
    size = gpu.training_size("card", 2, quick=True)
    work = 2 * 2 * 16 * gpu.flops_a_token(size.model, size.seq)
    turns = [{"ours_s": 2.0, "bare_s": 1.0}, {"ours_s": 2.0, "bare_s": 1.6}]
    line = gpu.mfu(size, [{"device": "Double Card", "flops": 4.0 * work}, *turns])
    assert line.value == pytest.approx(0.125)
    assert line.ratio == pytest.approx((0.5 + 0.8) / 2)
    assert line.note.startswith("Double Card; ")


@pytest.mark.net
def test_node_and_bare_loop_take_the_same_steps_on_the_device(accelerator):
    size = gpu.training_size(accelerator.type, 1, quick=True)

    async def turns():
        with ThreadPoolExecutor(1) as thread:
            return [turn async for turn in measured(size, choose(size.device), thread)]

    (turn,) = asyncio.run(turns())
    assert 0 < turn["ours_s"] < math.inf
    assert 0 < turn["bare_s"] < math.inf
    assert 0 < turn["loss"] < 6


def test_products_are_timed_where_the_device_trains(accelerator):
    assert product_flops(choose(accelerator.type), 16) > 0
    assert product_flops(Device(), 16) > 0


@pytest.mark.parametrize("name", ["diloco", pytest.param("sparseloco", marks=pytest.mark.ci_more)])
def test_a_member_makes_rounds_on_the_device_and_both_metrics_are_of_these(accelerator, name):
    options = {**METHODS[name], "period": 1}
    member = Member(Settings(name, options, 10_000, 2, False, device=accelerator.type))
    state = member.driver.method.eval_params(member.replica)
    assert all(x.device.type == accelerator.type for x in state.values())
    rounds = [member.round(), member.round()]
    time = gpu.exchange_time("gpu.exchange", rounds, gpu.copy_s(choose(accelerator.type), 10_000))
    assert 0 < time.value < math.inf
    assert time.ratio > 0
    assert "encode" in time.note
    memory = gpu.exchange_memory("gpu.memory", rounds)
    assert memory.value > 0
    assert memory.yardstick == 4 * member.count


@pytest.mark.parametrize("name", ["int8", "topk2:64/4096"])
def test_a_codec_is_timed_from_the_device_and_back(accelerator, name):
    line = gpu.codec_speed(name, 20_000, choose(accelerator.type), 1)
    assert line.metric == f"gpu.codec.{name}"
    assert 0 < line.yardstick < line.value
