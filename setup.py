"""Stops an installation whose links are plain files; the rest of the build is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

for name in ("backends", "policies"):
    if not (Path(__file__).parent / "polymp" / name).is_dir():
        raise SystemExit(
            f"polymp/{name} is not a folder. In a checkout it is a symbolic link to {name}/, and "
            "git has made a plain file of it. On Windows, turn on Developer Mode and clone again "
            "with git clone -c core.symlinks=true, or install a release: pip install polymp."
        )

setup()
