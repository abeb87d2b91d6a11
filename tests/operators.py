"""The operators that a block of code calls."""

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Their names, in `called`; `check(kwargs)` may refuse a call."""

    def __init__(self, check=lambda kwargs: None):
        super().__init__()
        self.called, self.check = set(), check

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.add(func.overloadpacket.__name__)
        self.check(kwargs or {})
        return func(*args, **(kwargs or {}))
