"""The few things that `CudaPagedKV` asks of a device, so that all its logic also runs where there is no GPU.

Work is given to *streams*, each of which does it in order; streams know nothing of each other. An *event* is a
point in a stream: it is over once the work given to the stream before it is. Only `wait` orders two streams.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Protocol, TypeAlias

import torch

from headwater.ports import BlockIds

Stream: TypeAlias = Any
Event: TypeAlias = Any

_log = logging.getLogger(__name__)


class Device(Protocol):
    """Streams, events and the copies that are given to streams. `Stream` and `Event` are the device's own types."""

    def stream(self) -> Stream:
        """A new stream."""

    def current_stream(self) -> Stream:
        """The stream to which the calling thread's own work goes."""

    def record(self, stream: Stream) -> Event:
        """A new event at the present end of a stream."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What is given to the stream from now on begins after the event is over; the caller does not wait."""

    def finished(self, event: Event) -> bool:
        """Whether an event is over, without waiting."""

    def synchronize(self, event: Event) -> None:
        """Wait, without the GIL, until an event is over."""

    def empty(self, size_bytes: int) -> torch.Tensor:
        """Bytes on the device, aligned to at least 16."""

    def upload(self, stream: Stream, numbers: BlockIds) -> torch.Tensor:
        """A device copy, for use on this stream only; the caller may change `numbers` at once."""

    def take(self, stream: Stream, pages: torch.Tensor, ids: torch.Tensor, target: torch.Tensor) -> None:
        """`target[l, i] = pages[l, ids[i]]`, in the stream."""

    def put(self, stream: Stream, pages: torch.Tensor, ids: torch.Tensor, source: torch.Tensor) -> None:
        """`pages[l, ids[i]] = source[l, i]`, in the stream; no id twice."""

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes between device and host memory, in the stream; the caller keeps both in place until then."""

    def pin(self, address: int, size_bytes: int) -> bool:
        """Let the device reach host memory directly; False, and everything as before, where that is not allowed."""

    def unpin(self, address: int) -> None:
        """The reverse; no copy from or to that memory may be under way."""


class TorchDevice:
    """A CUDA device through torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> Stream:
        """A stream of normal priority that does not wait for the default stream."""
        return torch.cuda.Stream(self._device)

    def current_stream(self) -> Stream:
        """torch's current stream of the calling thread."""
        return torch.cuda.current_stream(self._device)

    def record(self, stream: Stream) -> Event:
        """An event whose waiters sleep: the thread that copies must not take a core from the engine."""
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """See `Device`."""
        stream.wait_event(event)

    def finished(self, event: Event) -> bool:
        """See `Device`."""
        return event.query()

    def synchronize(self, event: Event) -> None:
        """See `Device`."""
        event.synchronize()

    def empty(self, size_bytes: int) -> torch.Tensor:
        """See `Device`."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def upload(self, stream: Stream, numbers: BlockIds) -> torch.Tensor:
        """Goes through torch's pinned allocator, which keeps the buffer until the stream has read it."""
        with torch.cuda.stream(stream):
            return torch.tensor(numbers, pin_memory=True).to(self._device, non_blocking=True)

    def take(self, stream: Stream, pages: torch.Tensor, ids: torch.Tensor, target: torch.Tensor) -> None:
        """See `Device`."""
        with torch.cuda.stream(stream):
            torch.index_select(pages, 1, ids, out=target)

    def put(self, stream: Stream, pages: torch.Tensor, ids: torch.Tensor, source: torch.Tensor) -> None:
        """See `Device`."""
        with torch.cuda.stream(stream):
            pages.index_copy_(1, ids, source)

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Device`."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def pin(self, address: int, size_bytes: int) -> bool:
        """Registers the range with CUDA, in a thread of its own.

        A refused registration stays behind as the calling thread's last CUDA error, and the next kernel launch of
        that thread would raise it; here it ends with the thread.
        """
        results: list[int] = []

        def register() -> None:
            with torch.cuda.device(self._device):
                results.append(int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)))

        thread = threading.Thread(target=register, name="headwater-pin")
        thread.start()
        thread.join()
        if results == [0]:
            return True
        _log.warning(
            "cannot pin %d bytes of node memory (CUDA error %s): copies stay correct but become several times slower; "
            "raise the memlock limit (ulimit -l), or lower node.host_memory",
            size_bytes,
            results[0] if results else "unknown",
        )
        return False

    def unpin(self, address: int) -> None:
        """See `Device`."""
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(address)
