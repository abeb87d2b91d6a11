"""A user's script against our types: a misspelt option is found before the program starts.

torch and other packages are taken as untyped, which saves most of the checkers' time."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from worlds.waiting import completed

pytestmark = pytest.mark.net

ROOT = Path(__file__).parents[3]
RIGHT = """
import torch

import farflock

model = torch.nn.Linear(2, 1)
inner = farflock.OuterSGD(lr=0.7)
with farflock.SwarmOptimizer(model, farflock.DiLoCo(period=5, outer=inner), lr=0.1) as optimizer:
    optimizer.step()
    last: farflock.Round | None = optimizer.last_round
    status: farflock.SwarmStatus = optimizer.status()
    names: tuple[str, ...] = status.members
with farflock.local_swarm(2, farflock.NoLoCo(period=5), view_s=1.0) as swarm:
    pass
try:
    farflock.SwarmOptimizer(model, "lean", period=3, codec="ecsq:98", view_s=2.0, buffers=None)
    farflock.SwarmOptimizer(model, "diloco", outer={"name": "sgd"}, codec=farflock.codec("int8"))
    farflock.SwarmOptimizer(model, host="::", port=4002, advertise=["203.0.113.7:4002"], up="5mbit")
except (farflock.Usage, farflock.RefusedByRun, farflock.Failure) as error:
    text: str = error.remedy
"""
WRONG = {
    'farflock.SwarmOptimizer(model, farflock.DiLoCo(period="x"))': 'Argument "period"',
    "farflock.DiLoCo(perod=5)": '"perod"',
    "farflock.SwarmOptimizer(model, 5)": "Argument 2",
    "count: int = optimizer.status().members": 'variable has type "int"',
    "farflock.Diloco()": 'no attribute "Diloco"',
    'farflock.SwarmOptimizer(model, "diloco", period="x")': 'Argument "period"',
    'farflock.SwarmOptimizer(model, "diloco", perod=5)': '"perod"',
    "farflock.SwarmOptimizer(model, up=5.0)": 'Argument "up"',
    "farflock.SwarmOptimizer(model, hots='::')": '"hots"',
    'farflock.SwarmOptimizer(model, deadline_s="soon")': 'Argument "deadline_s"',
    "farflock.SwarmOptimizer(model, farflock.DiLoCo(), viw_s=1.0)": '"viw_s"',
    'farflock.local_swarm(2, "ddp", codec=8)': 'Argument "codec"',
}
CONFIG = f"""
[mypy]
strict = true
explicit_package_bases = true
mypy_path = {ROOT}
[mypy-torch.*,numpy.*,msgspec.*,cryptography.*,safetensors.*,hivemind.*,zmq.*,tokenizers.*,blake3.*]
follow_imports = skip
ignore_missing_imports = true
[mypy-transformers.*,zstandard.*,scipy.*,base58.*,psutil.*]
follow_imports = skip
ignore_missing_imports = true
[mypy-farflock.*]
follow_imports = silent
"""


@pytest.fixture
def script(tmp_path):
    """A right script with a wrong line at its end for each mistake; returns the lines' numbers."""
    text = RIGHT + "".join(f"{line}\n" for line in WRONG)
    (tmp_path / "user.py").write_text(text)
    first = len(RIGHT.splitlines()) + 1
    return tmp_path, dict(enumerate(WRONG, first))


def test_mypy_finds_each_mistake_of_a_user_s_script_and_nothing_else(script):
    folder, wrong = script
    (folder / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(folder / "cache"), "user.py"]
    done = completed(command, cwd=folder, capture_output=True, text=True)
    found = [line.split(":", 2) for line in done.stdout.splitlines() if ": error:" in line]
    assert {int(number) for _, number, _ in found} == wrong.keys(), done.stdout + done.stderr
    for _, number, said in found:
        assert WRONG[wrong[int(number)]] in said


@pytest.mark.ci_more
@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_pyright_finds_them_too(script):
    folder, wrong = script
    options = {"extraPaths": [str(ROOT)], "typeCheckingMode": "strict"}
    (folder / "pyrightconfig.json").write_text(json.dumps(options))
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable, "user.py"]
    done = completed(command, cwd=folder, capture_output=True, text=True)
    report = json.loads(done.stdout)["generalDiagnostics"]
    ours = [each for each in report if each["severity"] == "error"]
    found = {each["range"]["start"]["line"] + 1 for each in ours}
    assert found == wrong.keys(), [each["message"] for each in ours]
