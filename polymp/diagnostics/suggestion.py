"""A suggestion of what to change: rows of a policy, another dtype, a loss scale."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from polymp.errors import escaped
from polymp.rules import policy_files
from polymp.rules.policy import Policy


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change to try; true if there is one. `print` shows it as rows for a policy's file.

    Attributes:
        rules: rows that hold everywhere, as `Policy.override` takes them.
        scopes: rows by pattern of module paths, as `Policy.override` takes them.
        dtype: "bfloat16" where no row makes float16 work, else None.
        init_scale: the loss scale to start with, None if that in use will do.
        reasons: sentences; there may be some where nothing has to change.
        head: of a policy's file, with which the printed text is a whole one: `extends` and `fp8`.
    """

    rules: Mapping[str, str] = field(default_factory=dict)
    scopes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    dtype: str | None = None
    init_scale: float | None = None
    reasons: tuple[str, ...] = ()
    head: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.rules or self.scopes or self.dtype or self.init_scale)

    def apply(self, policy: policy_files.Source) -> Policy:
        """Return a policy with the suggested rows.

        The suggested dtype and loss scale are for the caller: `autocast(dtype=)`,
        `GradScaler(init_scale=)`.

        Args:
            policy: as `polymp.policy` takes it.

        Returns:
            The policy.

        Raises:
            PolicyError: no such policy.
        """
        loaded = policy_files.load(policy)
        recipe = self.head.get("fp8", "")
        if not self.rules and not self.scopes and recipe in ("", loaded.fp8):
            return loaded
        return loaded.override(rules=self.rules, scopes=self.scopes, recipe=recipe)

    def __str__(self) -> str:
        """Rows to be pasted into a policy's file; all else is comments there, or its head."""
        lines = [f"# {escaped(' '.join(reason.split()))}" for reason in self.reasons]
        if not self:
            what = "No row, dtype or loss scale" if self.reasons else "Nothing"
            lines.append(f"# {what} to change.")
        lines += [f"{key} = {json.dumps(value)}" for key, value in self.head.items()]
        if self.dtype:
            lines.append(f"# Compute in {self.dtype}.")
        if self.init_scale:
            lines.append(f"# Start with a loss scale of {self.init_scale:g}.")
        if self.rules or self.scopes:
            rows = policy_files.load({"rules": self.rules, "scopes": self.scopes})
            text = policy_files.to_toml(rows).splitlines()
            lines += text[text.index("") :]  # behind its head
        return "\n".join(lines)
