"""A suggestion of what to change: rows of a policy, another dtype, a loss scale."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from polymp.rules import policy_files
from polymp.rules.policy import Policy


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What to change. True if there is anything to.

    Attributes:
        rules: rows that hold everywhere, as `Policy.override` takes them.
        scopes: rows by pattern of module paths, as `Policy.override` takes them.
        dtype: "bfloat16" where float16 is hopeless, else None.
        init_scale: the loss scale to start with, None if that in use will do.
        reasons: sentences, also where nothing is to be changed.
    """

    rules: Mapping[str, str] = field(default_factory=dict)
    scopes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    dtype: str | None = None
    init_scale: float | None = None
    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rules or self.scopes or self.dtype or self.init_scale)

    def apply(self, policy: policy_files.Source) -> Policy:
        """A policy with the suggested rows; the dtype and the scale are the caller's to take.

        Args:
            policy: as `polymp.policy` takes it.

        Raises:
            PolicyError: no such policy.
        """
        told = policy_files.load(policy)
        if not self.rules and not self.scopes:
            return told
        return told.override(rules=self.rules, scopes=self.scopes)

    def __str__(self) -> str:
        """Rows to be pasted into a policy's file; all else is comments there."""
        lines = [f"# {' '.join(reason.split())}" for reason in self.reasons]
        if not self:
            return "\n".join([*lines, "# Nothing to change."])
        if self.dtype:
            lines.append(f"# Compute in {self.dtype}.")
        if self.init_scale:
            lines.append(f"# Start with a loss scale of {self.init_scale:g}.")
        if self.rules or self.scopes:
            rows = policy_files.load({"rules": self.rules, "scopes": self.scopes})
            lines += policy_files.to_toml(rows).splitlines()[2:]  # behind its name and its halves
        return "\n".join(lines)
