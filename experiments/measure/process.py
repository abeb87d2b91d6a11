"""Measurements in fresh processes: a process' memory, and what ran before, move its numbers."""

import json
import subprocess
import sys
from typing import Any

import msgspec

from farflock.experiments.measure.metric import NotMeasured


def lines_of(what: str, module: str, settings: object, timeout_s: float) -> list[dict[str, Any]]:
    """Run `python -m MODULE SETTINGS` and return the JSON lines that it prints.

    Raise `NotMeasured`, with `what` as its name, if it fails or takes longer than `timeout_s`."""
    command = [sys.executable, "-m", module, msgspec.json.encode(settings).decode()]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise NotMeasured(f"{what} ended with {error.returncode}: {last}") from None
    except subprocess.TimeoutExpired:
        raise NotMeasured(f"{what} took more than {timeout_s:g} s") from None
    return [json.loads(line) for line in done.stdout.splitlines()]
