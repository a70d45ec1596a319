"""Regions and audits in either framework, where a test is the same for both."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from polymp.diagnostics.audit import Audit


def region(framework: str, low: str, policy: Any = None) -> Any:
    """A region of a policy: it wraps a function; in torch it is a context manager, too."""
    autocast = import_module(f"polymp.{framework}").autocast
    if framework == "torch":
        return autocast("cpu", low, policy=policy)
    return autocast(dtype=low, policy=policy)


def audited(framework: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Audit:
    """The audit of a call."""
    audit = import_module(f"polymp.{framework}").audit
    if framework == "torch":
        with audit(**options) as found:
            fn(*args)
        return found  # type: ignore[no-any-return]
    watched = audit(fn, **options)
    watched(*args)
    return watched.audit  # type: ignore[no-any-return]
