"""`polymp doctor`: the versions, devices and fast dtypes of this machine, and times of a model.

    gather() -> Facts -> diagnose(facts) -> plain data -> draw(data)
    --model: model, inputs -> a step in each dtype -> rounds that run all of them -> dtype to use

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
import timeit
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import polymp
from polymp import backends, progress, text_table, versions
from polymp.dtypes import FAST, processor
from polymp.errors import UsageError

Data = dict[str, Any]
Step = Callable[[str], object]  # runs a step in a dtype and waits until it has finished

_LISTED = (*FAST["bfloat16"], *FAST["float16"], "avx512_fp16")


class Framework(NamedTuple):
    """One framework on this machine."""

    name: str  # "torch" or "jax"
    version: str  # as installed, "" if it is not
    problem: str = ""  # the error of importing it or asking for its devices
    platform: str = ""  # where it runs by default


class Device(NamedTuple):
    """A device of a framework, and the dtypes that it multiplies faster than float32."""

    framework: str
    kind: str  # "cpu", "cuda", ...
    name: str  # the model
    bfloat16: bool | None  # True if fast, None if that is not known
    float16: bool | None
    by: str  # the feature that shows it, in words


# torch and jax, installed or not; their devices; True if an NVIDIA driver is loaded.
Facts = tuple[Sequence[Framework], Sequence[Device], bool]


def examined(args: argparse.Namespace) -> Data:
    """The facts of this machine and what follows from them, and the times of a model."""
    step: Data = {"step": timed(args.model)} if args.model else {}
    with progress.line("polymp doctor") as line:
        line.stage("asking the frameworks")
        return diagnose(gather()) | step


def cpu(framework: str, name: str, features: frozenset[str] | None) -> Device:
    """A CPU, by the features that it reports; None if the system does not list them."""
    if features is None:
        return Device(framework, "cpu", name, None, None, "this system does not list CPU features")
    listed = [feature for feature in _LISTED if feature in features]
    low = {dtype: not features.isdisjoint(names) for dtype, names in FAST.items()}
    by = ", ".join(listed) or "no bf16 or fp16 instructions"
    return Device(framework, "cpu", name, low["bfloat16"], low["float16"], by)


def gpu(framework: str, name: str, capability: tuple[int, int]) -> Device:
    """An NVIDIA GPU, by its compute capability.

    Source:
        CUDA C++ Programming Guide, "Compute capabilities": tensor cores have float16 since 7.0 and
        bfloat16 since 8.0.
    """
    by = "compute capability {}.{}".format(*capability)
    return Device(framework, "cuda", name, capability >= (8, 0), capability >= (7, 0), by)


def advice(device: Device) -> tuple[str, str]:
    """The dtype to use on a device, "" for none, and the reason."""
    if device.bfloat16:
        return "bfloat16", "fast here, with float32's range: no gradient scaler"
    if device.float16:
        return "float16", "fast here, and bfloat16 is not; ends at 65504: use a GradScaler"
    if device.bfloat16 is None:
        return "bfloat16", "speed unknown; it has float32's range: no gradient scaler"
    return "", "no low dtype is fast here: stay in float32, or use bfloat16 to save memory"


def diagnose(facts: Facts) -> dict[str, Any]:
    """Versions, devices, advice, problems and notes; `ok` if there is no problem."""
    frameworks, devices, nvidia = facts
    problems, notes = list[str](), list[str]()
    if not any(f.version or f.problem for f in frameworks):
        problems.append(
            "neither torch nor jax is installed: pip install 'polymp[torch]' or 'polymp[jax]'."
        )
    for name, version, problem, _ in frameworks:
        if version and not versions.within(version, versions.SUPPORTED[name]):
            known = versions.supported(name)
            problems.append(f"{name} {version} is not supported: install {known}.")
        if problem:
            problems.append(f"{name} {version} does not work: {problem}")
        seen = any(d.framework == name and d.kind != "cpu" for d in devices)
        if version and nvidia and not seen:
            notes.append(
                f"an NVIDIA driver is loaded, but {name} sees no GPU: is it a build for CPUs?"
            )
    return {
        "polymp": polymp.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "frameworks": [f._asdict() | {"supported": versions.supported(f.name)} for f in frameworks],
        "devices": [
            d._asdict() | dict(zip(("use", "why"), advice(d), strict=True)) for d in devices
        ],
        "problems": problems,
        "notes": notes,
        "ok": not problems,
    }


def gather() -> Facts:
    """The facts of this machine. Imports torch and jax, as far as they are installed."""
    frameworks, devices = [], list[Device]()
    for name, ask in (("torch", _ask_torch), ("jax", _ask_jax)):
        version = problem = where = ""
        if name in backends.installed():
            try:
                version = metadata.version(name)
                where = ask(devices)
            except Exception as error:  # any error of a framework is a finding
                problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        frameworks.append(Framework(name, version, problem, where))
    return frameworks, devices, Path("/proc/driver/nvidia/version").exists()


def _ask_torch(devices: list[Device]) -> str:
    import torch

    backends.get("torch")
    devices.append(cpu("torch", *processor()))
    kind = "cpu"
    if torch.cuda.is_available():
        kind = "cuda"
        for at in range(torch.cuda.device_count()):
            name = torch.cuda.get_device_name(at)
            if torch.version.hip:
                devices.append(Device("torch", "cuda", name, True, True, "ROCm"))
            else:
                devices.append(gpu("torch", name, torch.cuda.get_device_capability(at)))
    if torch.xpu.is_available():
        kind = "xpu"
        low = torch.xpu.is_bf16_supported(including_emulation=False)
        by = "torch.xpu.is_bf16_supported"
        devices.append(Device("torch", "xpu", torch.xpu.get_device_name(), low, True, by))
    if torch.backends.mps.is_available():
        kind = "mps"
        low = torch.backends.mps.is_macos_or_newer(14, 0)
        devices.append(
            Device("torch", "mps", "Apple GPU", low, True, "macOS has bfloat16 since 14")
        )
    return kind


def _ask_jax(devices: list[Device]) -> str:
    _leave_memory()
    import jax

    backends.get("jax")
    for device in jax.devices():
        if device.platform == "cpu":
            devices.append(cpu("jax", *processor()))
        elif device.platform == "tpu":
            devices.append(Device("jax", "tpu", device.device_kind, True, False, "a TPU"))
        elif re.fullmatch(r"\d+\.\d+", found := str(getattr(device, "compute_capability", ""))):
            major, minor = map(int, found.split("."))
            devices.append(gpu("jax", device.device_kind, (major, minor)))
        else:
            by = f"jax platform {device.platform} does not list dtypes"
            devices.append(Device("jax", device.platform, device.device_kind, None, None, by))
    return jax.default_backend()


# --- `--model`: the times of its step in float32, bfloat16 and float16 ----------------------------

FLOAT32, BFLOAT16, FLOAT16 = "float32", "bfloat16", "float16"
BUDGET = 5.0  # seconds of rounds
ROUNDS = 3, 200  # at least and at most
SHORTEST = 5e-3  # seconds of a figure: a shorter step runs several times
GAIN = 0.95  # a low dtype that takes a larger part of float32's time gains nothing beyond noise
WORTH_A_SCALER = 0.8  # float16 is advised if it takes a smaller part of bfloat16's time


def timed(text: str) -> Data:
    """Time the step of the model that `MODULE:FUNCTION` returns, and choose its dtype."""
    _leave_memory()
    with progress.line("polymp doctor") as line:
        line.stage("loading the model")
        framework, model, inputs = _example(text)
        backends.get(framework)
        line.stage("running it in each dtype")
        step, device, passes = (_torch_step if framework == "torch" else _jax_step)(model, inputs)
        start = time.perf_counter()
        lacking = dict[str, str]()
        for dtype in (FLOAT32, BFLOAT16, FLOAT16):
            try:
                step(dtype)
            except (Exception, SystemExit) as error:
                if dtype == FLOAT32:
                    why = f"calling the model on its inputs failed: {_error_line(error)}"
                    raise UsageError(f"--model {text}: {why}") from error
                lacking[dtype] = _error_line(error)
        dtypes = [d for d in (FLOAT32, BFLOAT16, FLOAT16) if d not in lacking]
        rounds = _rounds(step, dtypes)
    ratios = {dtype: _ratio(rounds[dtype], rounds[FLOAT32]) for dtype in dtypes[1:]}
    use, why = advised(ratios)
    return {
        "framework": framework,
        "device": device,
        "model": text,
        "passes": passes,
        "took": time.perf_counter() - start,
        "rounds": len(rounds[FLOAT32]),
        "seconds": {dtype: statistics.median(rounds[dtype]) for dtype in dtypes},
        "ratio": ratios,
        "use": use,
        "why": why,
        "lacking": lacking,
    }


def _torch_step(model: Any, inputs: tuple[Any, ...]) -> tuple[Step, str, str]:
    import torch
    from torch.utils._pytree import tree_leaves

    from polymp.torch import autocast

    device = next((p.device.type for p in model.parameters()), "cpu")
    trains = model.training and any(p.requires_grad for p in model.parameters())

    def step(dtype: str) -> None:
        low = None if dtype == FLOAT32 else dtype
        with torch.set_grad_enabled(trains):
            with autocast(device, low, enabled=low is not None):
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


def _rounds(step: Step, dtypes: list[str]) -> Mapping[str, list[float]]:
    """Seconds of a step by dtype; a round runs all dtypes, each round another one first."""

    def seconds(dtype: str, times: int) -> float:
        return timeit.timeit(lambda: step(dtype), number=times) / times

    times = {dtype: max(1, round(SHORTEST / seconds(dtype, 1))) for dtype in dtypes}
    end = time.perf_counter() + BUDGET
    found: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
    for at in range(ROUNDS[1]):
        if at >= ROUNDS[0] and time.perf_counter() >= end:
            break
        first = at % len(dtypes)
        for dtype in dtypes[first:] + dtypes[:first]:
            found[dtype].append(seconds(dtype, times[dtype]))
    return found


def _ratio(low: list[float], wide: list[float]) -> Data:
    """The median of times over that of float32's, and the quartiles of the rounds' ratios."""
    quartiles = statistics.quantiles([a / b for a, b in zip(low, wide, strict=True)])
    ratio = statistics.median(low) / statistics.median(wide)
    return {"ratio": ratio, "low": quartiles[0], "high": quartiles[2]}


def advised(ratios: Mapping[str, Data]) -> tuple[str, str]:
    """The dtype to use, by the ratios of the low dtypes to float32, and the reason."""
    times = ", ".join(f"{dtype} {r['ratio']:.2f}" for dtype, r in ratios.items())
    fast = {d: r["ratio"] for d, r in ratios.items() if r["ratio"] <= GAIN and r["high"] < 1}
    if not fast:
        return FLOAT32, f"no low dtype gains, as multiples of float32's time: {times or 'none ran'}"
    bfloat16 = fast.get(BFLOAT16)
    if bfloat16 is None or fast.get(FLOAT16, bfloat16) < WORTH_A_SCALER * bfloat16:
        return FLOAT16, f"{times} of float32's time; it needs a GradScaler in training"
    return BFLOAT16, f"{times} of float32's time; it needs no GradScaler"


# --- The model that `--model` names: MODULE:FUNCTION ----------------------------------------------


# "torch" or "jax"; a torch module, or a function of arrays; the positional arguments of a call.
Example = tuple[str, Any, tuple[Any, ...]]


def _leave_memory() -> None:
    """Keep jax from taking most of a GPU's memory when it is imported."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _example(text: str) -> Example:
    """Call a function that returns a model and its inputs: "train:example"."""
    module, _, name = text.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", text) or module.endswith(".py"):
        plain = ".".join(Path(module).with_suffix("").parts) if module.endswith(".py") else ""
        hint = f" Write {plain}:{name or 'example'}." if plain else ""
        raise UsageError(
            f"--model {text}: this is not MODULE:FUNCTION, as train:example for the function "
            f"example in train.py.{hint}"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        returned = pkgutil.resolve_name(text)()
    except (Exception, SystemExit) as error:
        raise UsageError(f"--model {text}: {_error_line(error)}") from error
    match returned:
        case (model, tuple() as inputs) if callable(model):
            torch = sys.modules.get("torch")
            is_torch = torch is not None and isinstance(model, torch.nn.Module)
            return "torch" if is_torch else "jax", model, inputs
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


def draw(data: Data, args: argparse.Namespace) -> Iterator[str | list[str]]:
    """The facts or the times of a model, then notes and problems."""
    yield f"polymp {data['polymp']}, Python {data['python']}, {data['system']}"
    yield ""
    if "step" in data:  # the advice then rests on it, not on the hardware's features
        yield from _draw_times(data["step"])
    else:
        yield from _draw_facts(data)
    yield ""
    yield from (f"note: {text}" for text in data["notes"])
    yield from (f"problem: {text}" for text in data["problems"])
    if data["ok"]:
        yield "nothing is wrong"


def _draw_facts(data: Data) -> Iterator[str | list[str]]:
    rows = [
        (f["name"], f["version"] or "not installed", f["supported"], f["platform"])
        for f in data["frameworks"]
    ]
    yield text_table.columns(("framework", "version", "supported", "runs on"), rows)
    if data["devices"]:
        devices = [
            (
                f"{d['framework']} {d['kind']}\n{d['name']}",
                f"{_fast(d)}\n{d['by']}",
                f"{d['use'] or 'float32'}\n{d['why']}",
            )
            for d in data["devices"]
        ]
        yield ["", *text_table.columns(("device", "fast dtypes", "use"), devices)]


def _fast(device: Data) -> str:
    low = [dtype for dtype in ("bfloat16", "float16") if device[dtype]]
    return " and ".join(low) or ("unknown" if device["bfloat16"] is None else "none")


def _draw_times(data: Data) -> Iterator[str | list[str]]:
    """The times, and the dtype to use."""
    yield (
        f"{data['model']} in {data['framework']} on {data['device']}, {data['passes']}: "
        f"{data['rounds']} rounds in {data['took']:.1f} s"
    )
    ratios = {
        dtype: f"{r['ratio']:.2f}  ({r['low']:.2f} to {r['high']:.2f})"
        for dtype, r in data["ratio"].items()
    }
    rows = [(dtype, _time(s), ratios.get(dtype, "1")) for dtype, s in data["seconds"].items()]
    yield ["", *text_table.columns(("dtype", "time", "of float32's"), rows), ""]
    yield f"use {data['use']}: {data['why']}"
    yield from (f"{dtype} does not run: {why}" for dtype, why in data["lacking"].items())


def _time(seconds: float) -> str:
    unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    return f"{seconds * size:.3g} {unit}"
