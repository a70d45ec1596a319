"""`polymp doctor`: the versions, devices and fast dtypes of this machine, and what to write.

    gather() -> Facts -> diagnose(facts) -> plain data -> draw(data)

Only `gather` looks at the machine; it imports torch and jax, as far as they are installed. The
rest works on facts of any machine.
"""

import argparse
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import polymp
from polymp import backends, integrations, progress, text_table, versions
from polymp.cli import model_times
from polymp.cli.user_model import leave_memory
from polymp.errors import UsageError
from polymp.rules import policy_files

Data = dict[str, Any]

# The CPU features, as Linux and macOS name them, that multiply a dtype in hardware. avx512_fp16 is
# not among them: products that add up in float32, as torch's and XLA's do, gain nothing from it.
_FAST = {
    "bfloat16": ("amx_bf16", "avx512_bf16", "bf16", "FEAT_BF16"),
    "float16": ("amx_fp16", "asimdhp", "FEAT_FP16"),
}
_LISTED = (*_FAST["bfloat16"], *_FAST["float16"], "avx512_fp16")


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


class Engine(NamedTuple):
    """The counts of ops that run with torch's own kernels on a device, and with polymp's."""

    device: str  # its type
    compiled: int  # ops that torch has compiled autocast kernels for
    ours: Mapping[str, int]  # ops that need a kernel of polymp's, by policy; "default" is torch's
    new: Sequence[str] = ()  # ops that this torch has kernels for and polymp's table of it lacks
    gone: Sequence[str] = ()  # the other way round


class Facts(NamedTuple):
    """A machine, as far as mixed precision goes."""

    system: str  # operating system and processor
    python: str
    frameworks: Sequence[Framework]  # torch and jax, installed or not
    devices: Sequence[Device] = ()
    engines: Sequence[Engine] = ()  # one for each device type with a table
    nvidia: bool = False  # True if an NVIDIA driver is loaded
    libraries: Mapping[str, str] = MappingProxyType({})  # installed versions, of `integrations`


def examined(args: argparse.Namespace) -> Data:
    """The facts of this machine and what follows from them, and the times of a model."""
    if args.seconds and not args.model:
        raise UsageError("--seconds: nothing is timed without --model.")
    step: Data = {}
    if args.model:
        step = {"step": model_times.timed(args.model, args.seconds or model_times.BUDGET)}
    with progress.line("polymp doctor") as line:
        line.stage("asking the frameworks")
        return diagnose(gather()) | step


def cpu(framework: str, name: str, features: frozenset[str] | None) -> Device:
    """A CPU, by the features that it reports; None if the system does not list them."""
    if features is None:
        return Device(framework, "cpu", name, None, None, "this system does not list CPU features")
    listed = [feature for feature in _LISTED if feature in features]
    low = {dtype: not features.isdisjoint(names) for dtype, names in _FAST.items()}
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
    """Versions, devices, advice, libraries, problems and notes; `ok` if there is no problem."""
    devices = [
        d._asdict() | dict(zip(("use", "why"), advice(d), strict=True)) for d in facts.devices
    ]
    frameworks = [f._asdict() | {"supported": versions.supported(f.name)} for f in facts.frameworks]
    problems, notes = list(_problems(facts)), list(_notes(facts))
    return {
        "polymp": polymp.__version__,
        "python": facts.python,
        "system": facts.system,
        "frameworks": frameworks,
        "devices": devices,
        "engines": [e._asdict() for e in facts.engines],
        "libraries": [integrations.of(n).at(v) for n, v in facts.libraries.items()],
        "problems": problems,
        "notes": notes,
        "ok": not problems,
    }


def _problems(facts: Facts) -> Iterator[str]:
    installed = [f for f in facts.frameworks if f.version]
    if not installed:
        yield "neither torch nor jax is installed: pip install 'polymp[torch]' or 'polymp[jax]'."
    for f in installed:
        if not versions.is_supported(f.name, f.version):
            yield f"{f.name} {f.version} is not supported: install {versions.supported(f.name)}."
        if f.problem:
            yield f"{f.name} {f.version} does not work: {f.problem}"


def _notes(facts: Facts) -> Iterator[str]:
    for f in facts.frameworks:
        seen = any(d.framework == f.name and d.kind != "cpu" for d in facts.devices)
        if f.version and facts.nvidia and not seen:
            yield f"an NVIDIA driver is loaded, but {f.name} sees no GPU: is it a build for CPUs?"
    for name, version in facts.libraries.items():
        row = integrations.of(name)
        if not row.is_supported(version):
            yield f"polymp is not tested with {name} {version}, but with {name}{row.bounds}."
    for e in facts.engines:
        table = f"the table torch-{e.device}"
        if e.new:
            yield f"{table} has no row for {', '.join(e.new)}: they run by torch's own kernels."
        if e.gone:
            yield f"{table} has rows without a kernel in torch, {', '.join(e.gone)}: not cast."


def gather() -> Facts:
    """The facts of this machine. Imports torch and jax, as far as they are installed."""
    frameworks, devices, engines = [], list[Device](), list[Engine]()
    for name, ask in (("torch", _ask_torch), ("jax", _ask_jax)):
        version = problem = where = ""
        if name in backends.installed():
            try:
                version = metadata.version(name)
            except metadata.PackageNotFoundError:
                version = "of unknown version"
            try:
                where = ask(devices, engines)
            except Exception as error:  # any error of a framework is a finding
                problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        frameworks.append(Framework(name, version, problem, where))
    return Facts(
        f"{platform.system()} {platform.machine()}",
        platform.python_version(),
        frameworks,
        devices,
        engines,
        Path("/proc/driver/nvidia/version").exists(),
        {row.name: version for row, version in integrations.installed()},
    )


def _ask_torch(devices: list[Device], engines: list[Engine]) -> str:
    import torch

    from polymp.backends.torch.autocast import kernel_registry, torch_table

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
    users = [name for name in policy_files.shipped() if not name.startswith("torch-")]
    for device in torch_table.DEVICES:
        tables = {"default": torch_table.policy(device)} | {n: policy_files.load(n) for n in users}
        ours = {
            name: len(kernel_registry.differing(table, device)) for name, table in tables.items()
        }
        engines.append(
            Engine(device, len(torch_table.kernels(device)), ours, *torch_table.drift(device))
        )
    return kind


def _ask_jax(devices: list[Device], engines: list[Engine]) -> str:
    leave_memory()
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


def processor() -> tuple[str, frozenset[str] | None]:
    """The CPU's name, and its features as the system lists them."""
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        text = listed.read_text(encoding="utf-8")
        name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
        features = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
        found = frozenset(features[1].split()) if features else None
        return name[1] if name else platform.machine(), found
    if sys.platform == "darwin":
        said = subprocess.run(["sysctl", "-a"], capture_output=True, text=True, check=True).stdout
        name = re.search(r"^machdep\.cpu\.brand_string: (.*)$", said, re.MULTILINE)
        has = re.findall(r"^hw\.optional\.arm\.(FEAT_\w+): 1$", said, re.MULTILINE)
        return name[1] if name else platform.machine(), frozenset(has)
    return platform.processor() or platform.machine(), None


def draw(data: Data, args: argparse.Namespace) -> Iterator[str | list[str]]:
    """The facts or the times of a model, then notes and problems."""
    yield f"polymp {data['polymp']}, Python {data['python']}, {data['system']}"
    yield ""
    if "step" in data:  # the advice then rests on it, not on the hardware's features
        yield from model_times.draw(data["step"])
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
    if data["engines"]:
        names = list(data["engines"][0]["ours"])
        engines = []
        for e in data["engines"]:
            counts = str(e["compiled"]), *(str(e["ours"][name]) for name in names)
            drift = ", ".join([f"+{op}" for op in e["new"]] + [f"-{op}" for op in e["gone"]])
            engines.append((e["device"], *counts, drift or "none"))
        yield ""
        yield (
            "ops that torch has compiled kernels for, and ops that need a kernel of polymp, "
            "by policy"
        )
        yield ["", *text_table.columns(("device", "torch's", *names, "drift"), engines)]
    if any(f["name"] == "jax" and f["platform"] for f in data["frameworks"]):
        yield ""
        yield "jax: programs are traced and rewritten, with jax's own kernels in every policy"
    if data["libraries"]:
        heads = ("library", "version", "tested with", "the line")
        libraries = [(x["name"], x["version"], x["tested"], x["line"]) for x in data["libraries"]]
        yield ["", *text_table.columns(heads, libraries)]


def _fast(device: Data) -> str:
    low = [dtype for dtype in ("bfloat16", "float16") if device[dtype]]
    return " and ".join(low) or ("unknown" if device["bfloat16"] is None else "none")
