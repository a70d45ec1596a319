"""The sdist and the wheels, built from the tracked files in a folder of their own."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import pytest

from polymp import versions
from tests.conftest import need
from tests.support.blocks import FILES, ROOT, URLS

LINKS = {"polymp/backends": "backends", "polymp/policies": "policies"}
GENERATED = {"PKG-INFO", "setup.cfg"}  # and the folder polymp.egg-info


class Built(NamedTuple):
    """The sdist and the wheel that were built."""

    tracked: set[str]  # the files of the repository, with folders in place of links
    sdist: dict[str, bytes]  # the files of the sdist by their paths in it
    wheel: Path  # made from the tree
    wheel_from_sdist: Path  # made from the unpacked sdist


def tracked() -> list[str]:
    """The files that git has, links among them; skips what calls it in an unpacked sdist."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no git checkout")
    command = ["git", "ls-files", "-z", "--cached"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in run.stdout.split("\0") if name and (ROOT / name).exists()]


def expanded(names: list[str]) -> Iterator[str]:
    """The files, with those of a folder in place of a link to it."""
    for name in names:
        if name not in LINKS:
            yield name
    for link, folder in LINKS.items():
        for name in names:
            if name.startswith(f"{folder}/"):
                yield link + name.removeprefix(folder)


def copy(names: list[str], to: Path) -> Path:
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    return to


def hook(call: str, folder: Path) -> subprocess.CompletedProcess[str]:
    code = f"from setuptools import build_meta as backend; backend.{call}"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def build(kind: str, folder: Path, to: Path) -> Path:
    to.mkdir()
    run = hook(f"build_{kind}({str(to)!r})", folder)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    (made,) = to.iterdir()
    return made


@pytest.fixture(scope="module")
def names() -> list[str]:
    need("setuptools")
    found = importlib.metadata.version("setuptools")
    if versions.parts(found) < (77,):
        pytest.skip(f"setuptools 77 or later builds polymp, and this is {found}")
    return tracked()


@pytest.fixture(scope="module")
def built(names: list[str], tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    tree = copy(names, folder / "tree")
    archive = build("sdist", tree, folder / "sdist")
    with tarfile.open(archive) as tar:
        assert not [member.name for member in tar if member.issym() or member.islnk()]
        tar.extractall(folder / "unpacked", filter="data")
    (sdist,) = (folder / "unpacked").iterdir()
    files = [path for path in sdist.rglob("*") if path.is_file()]
    held = {path.relative_to(sdist).as_posix(): path.read_bytes() for path in files}
    wheel = build("wheel", tree, folder / "wheel")
    again = build("wheel", sdist, folder / "again")
    return Built(set(expanded(names)), held, wheel, again)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: Path) -> Message:
    (text,) = (data for name, data in contents(wheel).items() if name.endswith("/METADATA"))
    return message_from_bytes(text)


def test_the_sdist_has_every_file_of_the_repository(built: Built) -> None:
    held = {name for name in built.sdist if not name.startswith("polymp.egg-info/")}
    assert sorted(built.tracked - held) == []
    assert held - built.tracked == GENERATED
    for name in ("tests/conftest.py", "docs/index.md", "policies/amp.toml"):
        assert built.sdist[name] == (ROOT / name).read_bytes()
    assert built.sdist["polymp/policies/amp.toml"] == built.sdist["policies/amp.toml"]


def test_the_wheel_of_the_sdist_is_that_of_the_tree(built: Built) -> None:
    assert built.wheel.name == built.wheel_from_sdist.name
    assert contents(built.wheel) == contents(built.wheel_from_sdist)


def test_the_wheel_has_every_file_of_the_package(built: Built) -> None:
    held = {name for name in contents(built.wheel) if ".dist-info/" not in name}
    assert held == {name for name in built.tracked if name.startswith("polymp/")}


def test_the_metadata_is_what_a_package_index_shows(built: Built) -> None:
    """README and addresses; that README's links are absolute and alive, test_docs.py says."""
    found = metadata(built.wheel)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert found.get_payload(decode=True) == readme.encode()
    assert found["Description-Content-Type"].startswith("text/markdown")
    addresses = dict(line.split(", ", 1) for line in found.get_all("Project-URL", []))
    assert addresses == URLS
    assert found["Author"] == "The polymp authors"
    assert found["License-Expression"] == "Apache-2.0"
    assert f"]({FILES}" in readme


@pytest.mark.parametrize("link", LINKS)
def test_a_checkout_with_files_in_place_of_links_says_so(
    link: str, names: list[str], tmp_path: Path
) -> None:
    """As git makes one where it may not create links."""
    parts = ("polymp/", "backends/", "policies/")
    copy([name for name in names if "/" not in name or name.startswith(parts)], tmp_path)
    (tmp_path / link).unlink()
    (tmp_path / link).write_text(f"../{LINKS[link]}")
    run = hook("get_requires_for_build_editable()", tmp_path)
    assert run.returncode != 0
    assert run.stderr.endswith(
        f"{link} is not a folder. In a checkout it is a symbolic link to {LINKS[link]}/, and git "
        "has made a plain file of it. On Windows, turn on Developer Mode and clone again with "
        "git clone -c core.symlinks=true, or install a release: pip install polymp.\n"
    )
