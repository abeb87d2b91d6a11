"""The most that devices can multiply, as their makers say: the yardstick of utilization.

In dense products of half precision (bf16, or fp16 where a device has no bf16) that are summed in
float32. Numbers "with sparsity" in data sheets are twice as large and do not apply.
"""

from farflock.node.model.device import Device

# TFLOPS by a part of the name that drivers give; of several parts that fit, the longest counts.
# From the makers' data sheets and white papers, as tables of several projects quote them.
_HALF_TFLOPS = {
    "H100": 989.4,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H200": 989.4,
    "A100": 312.0,
    "A30": 165.0,
    "L4": 121.0,
    "L40": 181.0,
    "L40S": 362.0,
    "V100": 125.0,
    "V100 PCIe": 112.0,
    "Tesla T4": 65.0,
    "RTX 3090": 71.0,
    "RTX 4090": 165.2,
    "MI300X": 1307.4,
}


def peak_flops(device: Device) -> float | None:
    """Return a device's highest operations per second in the precision that it trains in; None if
    its maker's number is not known here. A CPU has none, since its clock depends on the work."""
    if device.precision == "fp32":
        return None
    words = device.name.lower().replace("-", " ").split()
    if "laptop" in words:  # a smaller chip of the same name
        return None
    fitting = [name for name in _HALF_TFLOPS if _is_in(name.lower().split(), words)]
    return _HALF_TFLOPS[max(fitting, key=len)] * 1e12 if fitting else None


def _is_in(part: list[str], words: list[str]) -> bool:
    """Return whether these words follow one another in a name: `L4` is no part of `L40S`."""
    places = range(len(words) - len(part) + 1)
    return any(words[place : place + len(part)] == part for place in places)
