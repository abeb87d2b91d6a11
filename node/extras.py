"""Packages that an installation may lack, and the lines that install them."""

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec

from farflock.node.errors import Failure, FarflockError, Usage

EXTRAS = {  # package: the extra that brings it
    "lm_eval": "eval",
    "matplotlib": "plot",
    "pyarrow": "data",
    "tensorboard": "log",
    "transformers": "hf",
    "wandb": "log",
}
POSIX = ("fcntl", "resource", "termios")  # modules of Linux and macOS
_TORCH = "pip install torch"
_INDEX = "--index-url https://download.pytorch.org/whl"
_NVIDIA = ("/dev/nvidiactl", "/dev/nvidia0", "/usr/lib/wsl/lib/libcuda.so.1")
_ROCM = "/dev/kfd"


def is_here(package: str) -> bool:
    """Return whether a package is installed; do not import it."""
    return find_spec(package) is not None


def line_for(package: str) -> str:
    """Return the command that installs a package of an extra."""
    return f"`pip install 'farflock[{EXTRAS[package]}]'`"


def require(what: str, package: str) -> None:
    """Raise `Usage` if a package of an extra is missing; `what` is the option or file that needs
    it."""
    if not is_here(package):
        raise Usage(what, f"the package {package} is not installed", f"run {line_for(package)}")


def torch_line(platform: str = sys.platform, exists: Callable[[str], bool] = os.path.exists) -> str:
    """Return the command that installs the build of PyTorch for this machine. On Linux, PyPI has
    the build for CUDA, of several gigabytes."""
    if platform != "linux" or any(map(exists, _NVIDIA)):
        return f"`{_TORCH}`"
    if exists(_ROCM):
        return f"`{_TORCH} {_INDEX}/rocmX.Y`, where X.Y is your version of ROCm"
    return f"`{_TORCH} {_INDEX}/cpu`"


def absent(error: ModuleNotFoundError) -> FarflockError | None:
    """Return the sentence for a missing package that an installation may lack, else None."""
    package = (error.name or "").partition(".")[0]
    if package == "torch":
        return Failure("PyTorch is not installed", "", f"run {torch_line()}")
    if package in EXTRAS:
        return Failure(f"the package {package} is not installed", "", f"run {line_for(package)}")
    if package in POSIX:
        why = f"Python has no module {package} here"
        return Failure("Farflock does not run on this system", why, "use Linux, macOS or WSL2")
    return None
