"""`polymp doctor`: the versions and devices of this machine, and the times of a model.

    gather() -> frameworks with their devices -> examined: plain data -> draw(data)
    --model: model, inputs -> rounds that run a step in each dtype -> medians

Only `gather` and `timed` import torch and jax.
"""

import argparse
import os
import pkgutil
import platform
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import polymp
from polymp import backends, text_table, versions
from polymp.errors import UsageError
from polymp.rules.row import LOW

Data = dict[str, Any]
Step = Callable[[str], object]  # runs a step in a dtype and waits until it has finished


def examined(args: argparse.Namespace) -> Data:
    """Versions, devices, problems and notes; `ok` without problems; a model's times."""
    # Else jax takes most of a GPU's memory when it is imported.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    step: Data = {"step": timed(args.model)} if args.model else {}
    frameworks, nvidia = gather()
    problems, notes = list[str](), list[str]()
    if not any(f["version"] or f["problem"] for f in frameworks):
        problems.append(
            "neither torch nor jax is installed: pip install 'polymp[torch]' or 'polymp[jax]'."
        )
    for f in frameworks:
        name, version = f["name"], f["version"]
        f["supported"] = bounds = versions.SUPPORTED[name]
        if version and not versions.within(version, bounds):
            problems.append(f"{name} {version} is not supported: pip install '{name}{bounds}'.")
        if f["problem"]:
            problems.append(f"{name} {version} does not work: {f['problem']}")
        if version and nvidia and {*f["devices"]} <= {"cpu"}:
            notes.append(
                f"an NVIDIA driver is loaded, but {name} sees no GPU: is it a build for CPUs?"
            )
    return {
        "polymp": polymp.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu(),
        "frameworks": frameworks,
        "problems": problems,
        "notes": notes,
        "ok": not problems,
        **step,
    }


def cpu() -> str:
    """The CPU's name, and its instructions for bfloat16 if the system lists any features."""
    name, features = backends.processor()
    if features is None:
        return name
    listed = ", ".join(x for x in backends.MULTIPLY_BFLOAT16 if x in features)
    return f"{name}, instructions for bfloat16: {listed or 'none'}"


def gather() -> tuple[list[Data], bool]:
    """torch and jax, installed or not, with their devices; True if an NVIDIA driver is loaded."""
    frameworks = list[Data]()
    for name, devices in (("torch", _torch_devices), ("jax", _jax_devices)):
        found: Data = {"name": name, "version": "", "devices": [], "problem": ""}
        if name in backends.installed():
            try:
                found["version"] = metadata.version(name)
                backends.get(name)
                found["devices"] = devices()
            except Exception as error:  # any error of a framework is a finding
                found["problem"] = _error_line(error)
        frameworks.append(found)
    return frameworks, Path("/proc/driver/nvidia/version").exists()


def _torch_devices() -> list[str]:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    count = torch.accelerator.device_count()
    if accelerator.type == "cuda":
        return ["cpu", *map(torch.cuda.get_device_name, range(count))]
    return ["cpu", *[accelerator.type] * count]


def _jax_devices() -> list[str]:
    import jax

    return [device.device_kind for device in jax.devices()]


# --- `--model`: the times of its step in float32, bfloat16 and float16 ----------------------------

FLOAT32, BFLOAT16, FLOAT16 = "float32", "bfloat16", "float16"
BUDGET = 5.0  # seconds of rounds
ROUNDS = 3  # at least
GAIN = 0.95  # a low dtype that takes a larger part of float32's time gains nothing beyond noise
WORTH_A_SCALER = 0.8  # float16 is advised if it takes a smaller part of bfloat16's time


def timed(text: str) -> Data:
    """Time the step of the model that `MODULE:FUNCTION` returns, and choose its dtype."""
    model, inputs = _example(text)
    torch = sys.modules.get("torch")
    in_torch = torch is not None and isinstance(model, torch.nn.Module)
    framework = "torch" if in_torch else "jax"
    backends.get(framework)
    own = model.parameters() if in_torch else sys.modules["jax"].tree.leaves((model, inputs))
    kinds = {str(getattr(x, "dtype", "")).removeprefix("torch.") for x in own}
    if (in_torch or FLOAT32 not in kinds) and (low := kinds.intersection(LOW)):
        why = f"{'a parameter' if in_torch else 'an argument'} is {min(low)}"
        raise UsageError(f"--model {text}: {why}. Return it in float32, for autocast to lower.")
    step, device, passes = (_torch_step if in_torch else _jax_step)(model, inputs)
    times, lacking = dict[str, list[float]](), dict[str, str]()
    for dtype in (FLOAT32, BFLOAT16, FLOAT16):
        try:
            step(dtype)
            times[dtype] = []
        except (Exception, SystemExit) as error:
            if dtype == FLOAT32:
                why = f"calling the model on its inputs failed: {_error_line(error)}"
                raise UsageError(f"--model {text}: {why}") from error
            lacking[dtype] = _error_line(error)
    end = time.perf_counter() + BUDGET
    while (count := len(times[FLOAT32])) < ROUNDS or time.perf_counter() < end:
        for dtype, seconds in times.items():  # in turn: what disturbs one disturbs all
            start = time.perf_counter()
            step(dtype)
            seconds.append(time.perf_counter() - start)
    medians = {dtype: statistics.median(seconds) for dtype, seconds in times.items()}
    ratios = {dtype: median / medians[FLOAT32] for dtype, median in medians.items()}
    use, why = advised(ratios)
    return {
        "framework": framework,
        "device": device,
        "model": text,
        "passes": passes,
        "rounds": count,
        "seconds": medians,
        "ratio": ratios,
        "use": use,
        "why": why,
        "lacking": lacking,
    }


def _torch_step(model: Any, inputs: tuple[Any, ...]) -> tuple[Step, str, str]:
    import torch

    from polymp.backends.torch.compat import tree_leaves
    from polymp.torch import autocast

    device = next((p.device.type for p in model.parameters()), "cpu")
    trains = model.training and any(p.requires_grad for p in model.parameters())

    def step(dtype: str) -> None:
        with torch.set_grad_enabled(trains):
            with autocast(device, None if dtype == FLOAT32 else dtype, enabled=dtype != FLOAT32):
                results = tree_leaves(model(*inputs))
            ends = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
            if trains and ends:
                torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
                model.zero_grad()
        if device != "cpu":
            torch.accelerator.synchronize()

    return step, device, "forward and backward" if trains else "forward"


def _jax_step(function: Any, inputs: tuple[Any, ...]) -> tuple[Step, str, str]:
    import jax

    from polymp.backends.jax.modules import nnx
    from polymp.jax import autocast

    function, inputs = nnx.owned(function, inputs)
    jit: Callable[[Any], Any] = jax.jit
    if nnx.among(inputs):
        from flax import nnx as flax_nnx

        jit = flax_nnx.jit
    compiled = {dtype: jit(autocast(function, dtype=dtype)) for dtype in (BFLOAT16, FLOAT16)}
    compiled[FLOAT32] = jit(function)

    def step(dtype: str) -> None:
        jax.block_until_ready(compiled[dtype](*inputs))

    return step, jax.default_backend(), "one call, compiled"


def advised(ratios: Mapping[str, float]) -> tuple[str, str]:
    """The dtype to use, by the times of all as multiples of float32's, and the reason."""
    fast = {dtype: ratio for dtype, ratio in ratios.items() if ratio <= GAIN}
    if not fast:
        return FLOAT32, "no low dtype takes less time"
    bfloat16 = fast.get(BFLOAT16)
    if bfloat16 is None or fast.get(FLOAT16, bfloat16) < WORTH_A_SCALER * bfloat16:
        return FLOAT16, "it needs a GradScaler in training"
    return BFLOAT16, "it needs no GradScaler"


def _example(text: str) -> tuple[Any, tuple[Any, ...]]:
    """The model and its inputs, from a function: "train:example", or "train.py:example"."""
    module, _, name = text.partition(":")
    place = f"{module.removesuffix('.py').replace(os.sep, '.')}:{name}"
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", place):
        raise UsageError(
            f"--model {text}: this is not MODULE:FUNCTION, as train:example for the function "
            "example in train.py."
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        returned = pkgutil.resolve_name(place)()
    except (Exception, SystemExit) as error:
        raise UsageError(f"--model {text}: {_error_line(error)}") from error
    match returned:
        case (model, tuple() as inputs) if callable(model):
            return model, inputs
    kinds = type(returned).__name__
    if isinstance(returned, tuple):
        kinds = f"({', '.join(type(one).__name__ for one in returned)})"
    raise UsageError(
        f"--model {text}: {name}() returned {kinds}. Return (model, inputs): a torch module and "
        "the tuple of its inputs, or a JAX function and the tuple of its arguments. A single "
        "input x is the tuple (x,)."
    )


def _error_line(error: BaseException) -> str:
    """The type and first line of an error, and the last line of the user's folder on its way."""
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    frames = reversed(traceback.extract_tb(error.__traceback__))
    own = (f for f in frames if Path(f.filename).is_relative_to(Path.cwd()))
    at = next((f"{Path(f.filename).relative_to(Path.cwd())}:{f.lineno}" for f in own), "")
    return f"{text} ({at})" if at else text


# --- What is drawn --------------------------------------------------------------------------------


def draw(data: Data) -> Iterator[str | list[str]]:
    """Versions and devices, the times of a model, then notes and problems."""
    yield f"polymp {data['polymp']}, Python {data['python']}, {data['system']}"
    yield data["cpu"]
    for f in data["frameworks"]:
        devices = f": {text_table.counted(f['devices'])}" if f["devices"] else ""
        yield f"{f['name']} {f['version'] or 'is not installed'}{devices}"
    yield ""
    if "step" in data:
        yield from _draw_times(data["step"])
        yield ""
    yield from (f"note: {text}" for text in data["notes"])
    yield from (f"problem: {text}" for text in data["problems"])
    if data["ok"]:
        yield "nothing is wrong"


def _draw_times(data: Data) -> Iterator[str | list[str]]:
    """The times, and the dtype to use."""
    yield (
        f"{data['model']} in {data['framework']} on {data['device']}, {data['passes']}: "
        f"median of {data['rounds']} rounds"
    )
    rows = [
        (dtype, f"{1e3 * seconds:,.3f} ms", f"{data['ratio'][dtype]:.2f}")
        for dtype, seconds in data["seconds"].items()
    ]
    heads = "dtype", "time", "of float32's"
    yield ["", *text_table.columns(heads, rows, heads[1:]), ""]
    yield f"use {data['use']}: {data['why']}"
    yield from (f"{dtype} does not run: {why}" for dtype, why in data["lacking"].items())
