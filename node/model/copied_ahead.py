"""A device's tensors, changed on the host block by block while the copies of other blocks run."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from farflock.optimizers.method import BlockChange, TensorBlock
from farflock.optimizers.parts.blocks import BLOCK_VALUES

TURNS = 2  # one block is worked on while the next one comes and the one before goes back


class _Turn:
    """The memory on the host that one block comes to and goes back from."""

    def __init__(self, tensors: int, *, pinned: bool) -> None:
        self.came, self.goes = (
            torch.empty(tensors, BLOCK_VALUES, dtype=torch.float32, pin_memory=pinned)
            for _ in range(2)
        )
        self.here: torch.cuda.Event | None = None  # set once the block has come


class CopiedAhead:
    """Flat tensors of one device and their changes.

    On CUDA the copies use pinned memory and a stream of their own: it begins after what the device
    was asked to compute before, and what it is asked afterwards waits for it. The stream copies in
    order, so once a block has come, the one that had the same memory before has gone back.
    Elsewhere a copy has ended when it returns, and the same turns are taken."""

    def __init__(self, flat: Sequence[Tensor]) -> None:
        self._flat, self._cuda = flat, flat[0].is_cuda
        self._stream = (
            torch.cuda.Stream(flat[0].device)  # type: ignore[no-untyped-call] # torch has not typed it
            if self._cuda
            else None
        )
        self._turns = [_Turn(len(flat), pinned=self._cuda) for _ in range(TURNS)]

    def change(self, blocks: Sequence[TensorBlock], change: BlockChange) -> None:
        """Set each block of the tensors to what `change` makes of it, None leaving it as it is."""
        with self._after_what_was_asked():
            for number, block in enumerate(blocks):
                if not number:
                    self._fetch(0, block)
                turn = self._turns[number % TURNS]
                if turn.here is not None:
                    turn.here.synchronize()
                if number + 1 < len(blocks):
                    self._fetch(number + 1, blocks[number + 1])
                length = block.stop - block.start
                new = change(block, *(values[:length] for values in turn.came))
                self._return(turn, block, new)

    def _fetch(self, number: int, block: TensorBlock) -> None:
        turn = self._turns[number % TURNS]
        with self._aside():
            for values, x in zip(turn.came, self._flat, strict=True):
                place = block.of(x)
                values[: len(place)].copy_(place, non_blocking=self._cuda)
            if self._stream is not None:
                turn.here = self._stream.record_event()

    def _return(self, turn: _Turn, block: TensorBlock, new: Sequence[Tensor | None]) -> None:
        for values, x, changed in zip(turn.goes, self._flat, new, strict=True):
            if changed is None:
                continue
            place = block.of(x)
            going = values[: len(place)].copy_(changed)
            with self._aside():
                place.copy_(going, non_blocking=self._cuda)

    def _aside(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which copies are asked for."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextlib.contextmanager
    def _after_what_was_asked(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        asked = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(asked)
        yield
        asked.wait_stream(self._stream)
