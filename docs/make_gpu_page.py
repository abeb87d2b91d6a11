"""Make docs/benchmarks-gpu.md from the lines that `farflock bench gpu --json` printed:
`python docs/make_gpu_page.py LINES... --commit COMMIT --date DATE`. `make gpu-bench` calls it.

Of several files the last line of a metric counts, so that a device that is at hand for a short time
can be measured in parts.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).with_name("benchmarks-gpu.md")
INTRO = """\
# Benchmarks on a GPU

<!-- Made by `make gpu`; run it again rather than edit this page. -->

One JSON line of `farflock bench gpu` per row; its docstring says how each is measured. Every
yardstick ran on the same device in the same call, in turns."""
COLUMNS = ("metric", "value", "yardstick", "ratio", "n", "unit", "note")


def page(lines: list[dict[str, Any]], device: str, commit: str, date: str) -> str:
    """Return the page."""
    measured = f"Measured on {device}, torch {torch.__version__}, commit {commit}, {date}."
    rows = [[_cell(line[name]) for name in COLUMNS] for line in lines]
    table = "\n".join("| " + " | ".join(row) + " |" for row in [COLUMNS, ["---"] * 7, *rows])
    return f"{INTRO}\n\n{measured}\n\n{table}\n"


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")


def main() -> int:
    """Write the page; return 1, with the reason, if there is no line to write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", type=Path, nargs="+")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--date", required=True)
    asked = parser.parse_args()
    found = [json.loads(line) for file in asked.lines for line in file.read_text().splitlines()]
    lines = list({line["metric"]: line for line in found if "metric" in line}.values())
    if not lines:
        files = ", ".join(map(str, asked.lines))
        sys.stderr.write(f"{files} has no metric; {PAGE} is left as it is\n")
        return 1
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    name = "a CPU" if accelerator is None else _name(accelerator)
    PAGE.write_text(page(lines, name, asked.commit, asked.date))
    return 0


def _name(accelerator: torch.device) -> str:
    module = torch.get_device_module(accelerator)
    return str(getattr(module, "get_device_name", lambda: accelerator.type)())


if __name__ == "__main__":
    sys.exit(main())
