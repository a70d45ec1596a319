"""A process that runs steps, asked by gpu.py: `python -m gpu_steps.worker cuda`.

In: a line of JSON a step, with the function that runs it ("module:function") and its arguments.
Out: a line for each, with what the function returned, or the error. What steps print goes to the
error output. The process ends with the one that asks it, even in the middle of a step.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

from pairing import plain


@dataclass(frozen=True)
class Here:
    """The device and the size that every step is given.

    Attributes:
        device: "cuda", or "cpu" for a dry run.
        small: tiny sizes and few rounds: to see that it runs. Its figures mean nothing.
    """

    device: str
    small: bool


def end_with_parent() -> None:
    """Kill this process and what it started once the process that started it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def run(request: dict[str, Any], here: Here) -> dict[str, Any]:
    """Run one step: {"is": what it returned}, or {"error": why it returned nothing}."""
    module, _, function = request["run"].partition(":")
    try:
        found = getattr(importlib.import_module(module), function)(here, **request["args"])
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error).strip()[:500]}"}
    return {"is": found}


def main() -> None:
    """Answer requests until there are no more."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    device = sys.argv[1]
    here = Here(device, small=device == "cpu")
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line), here), default=plain) + "\n")


if __name__ == "__main__":
    main()
