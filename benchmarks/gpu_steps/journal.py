"""The steps that have ended, on disk one by one, and the records that are made of them.

A journal is a file of lines of JSON, an `Entry` each. A line is flushed to the disk before the next
step starts, so that a call that is killed loses the step that ran, and no other. Steps return parts
of records, as pairing.py has them; the record of a part is what all of its steps returned, put
together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pairing import Row, plain, save

Status = Literal["done", "absent", "failed"]
Record = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One step that has ended.

    Attributes:
        step: its name.
        part: the record that it belongs to.
        status: "done"; "absent" if something that it needs is not there; "failed" if it raised,
            died or took too long.
        seconds: how long it took.
        why: the reason, if it is not done.
        record: what it returned; the machine with it.
        date: of its end, in UTC.
    """

    step: str
    part: str
    status: Status
    seconds: float
    why: str = ""
    record: Record = field(default_factory=dict)
    date: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%d}")


class Journal:
    """A file of entries.

    Args:
        path: the file; made with the first entry.

    Attributes:
        entries: by step; of a step that ran again, the last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Entry] = {}
        if not path.exists():
            return
        text = path.read_bytes()
        whole, _, torn = text.rpartition(b"\n")  # a write that was cut short ends in no newline
        for line in whole.splitlines():
            entry = Entry(**json.loads(line))
            self.entries[entry.step] = entry
        if torn:
            os.truncate(path, len(text) - len(torn))

    def add(self, entry: Entry) -> None:
        """Write an entry, and wait until it is on the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(asdict(entry), default=plain) + "\n"
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())
            os.fsync(file.fileno())
        self.entries[entry.step] = entry


def put_together(entries: Iterable[Entry]) -> dict[str, Record]:
    """The record of each part.

    Tables and other mappings are joined by key, and lists one after the other, each item once. What
    a failed or absent step would have measured stands under "missing".
    """
    parts: dict[str, Record] = {}
    for entry in entries:
        record = parts.setdefault(entry.part, {"tables": {}, "missing": {}})
        record["measured"] = max(record.get("measured", ""), entry.date)
        _join(record, entry.record)
        if entry.status != "done":
            record["missing"][entry.step] = entry.why
    for record in parts.values():
        record.setdefault("machine", _machine(parts))
    return parts


def _join(into: Record, more: Record) -> None:
    for key, value in more.items():
        if isinstance(value, dict):
            _join(into.setdefault(key, {}), value)
        elif isinstance(value, list):
            kept = into.setdefault(key, [])
            kept += [item for item in value if item not in kept]
        else:
            into[key] = value


def _machine(parts: dict[str, Record]) -> Record:
    """The machine, for a part none of whose steps could tell it."""
    nothing = dict.fromkeys(("kind", "architecture", "python"), "") | {"cores": 0, "load": 0.0}
    return next(
        (r["machine"] for r in parts.values() if r.get("machine")), nothing | {"versions": {}}
    )


def save_records(entries: Iterable[Entry], device: str, folder: Path) -> list[Path]:
    """Write one record a part into a folder, and return the files."""
    found = []
    for part, record in put_together(entries).items():
        date = record.pop("measured")
        record["tables"] = {
            title: [Row(**row) for row in rows] for title, rows in record["tables"].items()
        }
        found.append(save(part, device, record, date=date, folder=folder))
    return found
