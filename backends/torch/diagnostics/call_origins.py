"""Where ops are called, and in the backward pass of which op call, if in one.

Each autograd node that is made while ops run is remembered with the op call that made it. When the
engine runs a node, the ops in it are the backward of that call.
"""

from types import FrameType

import torch.nn as nn

from polymp.backends.torch.compat import autograd
from polymp.backends.torch.diagnostics.call_site import CallSite, CallSites
from polymp.backends.torch.diagnostics.op_call import OpCall
from polymp.diagnostics.call_record import BACKWARD, FORWARD, RECOMPUTE


class CallOrigins:
    """Call sites, and the op calls that made autograd nodes.

    Args:
        model: modules are reported by their paths in it; None for their paths in the outermost
            module that runs.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._call_sites = CallSites(model)
        self._of_node: dict[int, OpCall] = {}
        self._first_node = 0

    def begin(self) -> None:
        """Leave out the nodes that have been made so far."""
        self._first_node = autograd.latest_node() + 1

    def forget(self) -> None:
        """Forget all nodes."""
        self._of_node.clear()

    def where(self, frame: FrameType | None) -> tuple[CallSite, str, OpCall | None]:
        """Return call site and direction, and the call whose backward, by torch, runs here."""
        place, node = self._call_sites.here(frame), autograd.backward_node()
        if place.recomputed or node is None:
            return place, RECOMPUTE if place.recomputed else FORWARD, None
        origin = self._of_node.get(node)
        if origin is None:
            return place, BACKWARD, None
        if not place.source:
            return origin.place, BACKWARD, origin
        # The user's own backward, or a hook, in which ops are called as anywhere.
        return place._replace(module=place.module or origin.place.module), BACKWARD, None

    def running(self) -> OpCall | None:
        """Return the call whose autograd node the engine runs now; None outside of backward."""
        node = autograd.backward_node()
        return None if node is None else self.maker(node)

    def maker(self, node: int) -> OpCall | None:
        """Return the call that made a node; None if it is not known."""
        return self._of_node.get(node)

    def new_node(self) -> int | None:
        """Return the number of the node that was made last; None if its call is known."""
        number = autograd.latest_node()
        return number if number >= self._first_node and number not in self._of_node else None

    def made(self, node: int, op_call: OpCall) -> None:
        """Remember that a call made a node."""
        self._of_node[node] = op_call
