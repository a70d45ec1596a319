"""`AsyncCopy`: a copy of a tensor to the host, for which the host need not wait."""

import torch


class AsyncCopy:
    """A copy of a tensor on its way to the host, for a `polymp.mailbox.Mailbox`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.Event | None = None
        self._copy = tensor.to("cpu", non_blocking=True)
        if tensor.device.type != "cpu":
            self._event = torch.Event(tensor.device)
            self._event.record()

    def is_ready(self) -> bool:
        """Return whether `values` would not wait; on the CPU it never does."""
        return self._event is None or self._event.query()

    def values(self) -> torch.Tensor:
        """Return the copy. Waits for it."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
