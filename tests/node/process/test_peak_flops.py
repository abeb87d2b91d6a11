"""The makers' numbers for devices, found by the names that drivers give."""

import pytest

from farflock.node.model.device import Device
from farflock.node.process.peak_flops import peak_flops


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("Tesla V100-PCIE-16GB", 112.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("Tesla T4", 65.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_a_known_device_is_found_by_its_driver_s_name(name, tflops):
    assert peak_flops(Device(name=name, precision="bf16")) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "name", ["NVIDIA L400", "A1000", "NVIDIA GeForce RTX 4090 Laptop GPU", "the CPU", ""]
)
def test_a_device_that_is_not_known_has_no_number(name):
    assert peak_flops(Device(name=name, precision="bf16")) is None


def test_numbers_of_half_precision_are_not_those_of_float32():
    assert peak_flops(Device(name="NVIDIA H100 80GB HBM3", precision="fp32")) is None
