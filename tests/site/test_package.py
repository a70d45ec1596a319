"""The package itself: what importing it imports, and what an installed copy would hold."""

from importlib import metadata

import pytest

from polymp import backends, versions
from polymp.errors import VersionWarning
from tests.conftest import need
from tests.support import processes
from tests.support.commands import project
from tests.support.processes import ROOT


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after the statement."""
    code = f"{statement}\nimport sys; print(*{{m.partition('.')[0] for m in sys.modules}})"
    return set(processes.run(code).split())


HEAVY = {"torch", "jax", "numpy", "ml_dtypes", "matplotlib"}


def test_the_core_imports_no_framework():
    statements = (
        "import polymp; polymp.policy('torch-cuda')",
        "from polymp.rules import policy_files as p; [p.load(name) for name in p.shipped()]",
        "polymp.policy('amp').override(fp32=['gelu']).why('gelu', 'float16')",
        "import polymp.backends",
    )
    assert not loaded_after("\n".join(statements)) & HEAVY


def test_importing_changes_nothing_in_torch_and_imports_no_jax():
    need("torch")
    code = (
        "import torch; before = {k: len(torch._C._dispatch_get_registrations_for_dispatch_key(k))"
        " for k in ('AutocastCPU', 'AutocastCUDA', 'FuncTorchDynamicLayerFrontMode')}\n"
        "import polymp.torch, sys\n"
        "after = {k: len(torch._C._dispatch_get_registrations_for_dispatch_key(k)) for k in before}"
        "\nassert before == after, (before, after)\nassert 'torch._dynamo' not in sys.modules"
        "\nassert 'jax' not in sys.modules"
    )
    processes.run(code)


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"^no backend 'tf'; there are torch, jax$"):
        backends.get("tf")


DOORS = [("torch", "2.16.0a0+git1234567"), ("jax", "0.12.0.1")]


@pytest.mark.parametrize(("name", "beyond"), DOORS)
def test_a_newer_framework_is_warned_of_once_where_polymp_is_imported(name, beyond, tmp_path):
    need(name)
    main = tmp_path / "main.py"
    main.write_text(
        f"import {name}\n{name}.__version__ = {beyond!r}\n"
        f"import polymp.{name}\n"
        f"from polymp import backends\n"
        f"backends.get({name!r})\nbackends.get({name!r})\n"
    )
    done = processes.python(main)
    assert done.stderr.count("VersionWarning") == 1, done.stderr
    bounds = versions.SUPPORTED[name]
    assert (
        f"main.py:3: VersionWarning: polymp is tested with {name}{bounds}, and this is {name} "
        f"{beyond}. Update polymp, or install a tested version: pip install '{name}{bounds}'.\n"
    ) in done.stderr


def test_every_way_in_says_what_to_install():
    """In a fresh interpreter that has neither framework, and the adapters' libraries."""
    ways = "import polymp.{}", "import polymp.backends.{}.autocast.api", "polymp.backends.get({!r})"
    adapters = ("accelerate", "lightning", "transformers")
    need(*adapters)
    lines = [way.format(name) for name in ("torch", "jax") for way in ways]
    lines += [f"import polymp.{adapter}" for adapter in adapters]
    code = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *p: None if n in ('torch', 'jax') else find(n, *p)\n"
        "sys.modules['torch'] = sys.modules['jax'] = None\n"
        "import polymp.backends\n"
        f"for line in {lines}:\n"
        "  try:\n    exec(line)\n"
        "  except polymp.BackendMissingError as error:\n    print(error)\n"
    )
    assert processes.run(code).splitlines() == [
        f"polymp.{name} needs the {name} package: pip install 'polymp[{name}]'."
        for name in [*["torch"] * 3, *["jax"] * 3, *["torch"] * len(adapters)]
    ]


@pytest.mark.parametrize("name", ["polymp", "polymp.torch", "polymp.jax"])
def test_dir_shows_the_api_and_nothing_else(name):
    """Neither rooms nor names that a module binds for itself; the doors once they are imported.

    And every name that a public module has, except submodules, is in its list of names. JAX's door
    imports no other package.
    """
    if name != "polymp":
        need(name.removeprefix("polymp."))
    code = (
        f"import polymp, types, {name} as module\n"
        "before = dir(polymp)\n"
        "assert set(before) == {*polymp.__all__, *sys.argv[1:]}, before\n"
        "assert dir(module) == [*module.__all__, *(sys.argv[1:] if module is polymp else ())]\n"
        "for found in dir(module): getattr(module, found)\n"
        "shown = [n for n in dir(module) if n.startswith('_') and n != '__version__']\n"
        "assert not shown, shown\n"
        "space = {}; exec(f'from {module.__name__} import *', space)\n"
        "assert set(space) - {'__builtins__'} == set(module.__all__), set(space)\n"
        "for public in (polymp, module):\n"
        "    for name, found in vars(public).items():\n"
        "        hidden = name.startswith('_') or isinstance(found, types.ModuleType)\n"
        "        assert hidden or name in public.__all__, (public, name)\n"
    )
    if name == "polymp.jax":
        code += "assert not {'torch', 'flax', 'optax'} & sys.modules.keys()\n"
    doors = [] if name == "polymp" else [name.removeprefix("polymp.")]
    processes.run(f"import sys\n{code}", *doors)


# --- What adapters are tested with, and what an adapter says of its library -----------------------


@pytest.mark.parametrize("name", versions.TESTED)
def test_an_extra_pins_what_its_adapter_is_tested_with(name):
    bounds = versions.TESTED[name]
    first, end = map(versions.parts, bounds.split(","))
    assert bounds.startswith(">=")
    assert first < end
    assert f"{name}{bounds}" in project()["optional-dependencies"][name]
    assert (ROOT / "polymp" / f"{name}.py").is_file()


def test_an_adapter_warns_of_a_version_that_is_not_tested(monkeypatch):
    need("jax")
    monkeypatch.setitem(versions.TESTED, "optax", ">=9,<10")
    version = metadata.version("optax")
    with pytest.warns(VersionWarning) as warned:
        assert versions.require("optax").__name__ == "optax"
    assert str(warned[0].message) == (
        f"polymp is tested with optax>=9,<10, and this is optax {version}. Update polymp, or "
        "install a tested version: pip install 'optax>=9,<10'."
    )
