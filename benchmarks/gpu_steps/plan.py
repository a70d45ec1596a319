"""The steps of `make gpu`, the most worthwhile first.

Seconds are budgets for one GPU of the size of an H100: a step that takes longer is ended.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Step:
    """One measurement, which ends with a result on disk.

    Attributes:
        name: no two are the same.
        part: the record that it belongs to.
        run: "module:function" in this folder; see `worker.run`.
        seconds: its budget.
        process: steps that name the same process run in one.
        needs: packages that it imports.
        cuda: whether it says nothing on a CPU.
        dry: whether the dry run has it; where several steps run the same code, a few of them do.
        args: of the function.
    """

    name: str
    part: str
    run: str
    seconds: int
    process: str
    needs: tuple[str, ...] = ()
    cuda: bool = False
    dry: bool = True
    args: dict[str, Any] = field(default_factory=dict)

    def absent(self, device: str) -> str:
        """Why it cannot run here; "" if it can."""
        if self.cuda and device != "cuda":
            return "it needs CUDA"
        if device == "cpu" and not self.dry:
            return "the dry run has others of its kind"
        gone = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"{', '.join(gone)} is not installed" if gone else ""


TORCH, JAX = ("torch",), ("jax",)


def _torch_speed(workload: str, seconds: int, kind: str = "eager") -> Step:
    name = f"torch speed: {workload}" + ("" if kind == "eager" else f", {kind}")
    args = {"workload": workload, "kind": kind}
    needs = ("torch", "rich", "tqdm", "matplotlib")
    run = "gpu_steps.torch_programs:speed"
    dry = workload in ("train", "mlp 1")
    return Step(
        name, "torch-speed", run, seconds, "torch speed", needs, kind != "eager", dry, args
    )  # fmt: skip


def _jax_speed(workload: str, seconds: int) -> Step:
    return Step(
        f"JAX speed: {workload}",
        "jax-speed",
        "gpu_steps.jax_programs:speed",
        seconds,
        "jax",
        ("jax", "optax", "rich"),
        dry=workload == "train",
        args={"workload": workload},
    )


def _ask(run: str, seconds: int, cuda: bool = True) -> Step:
    framework = run.partition("_")[0]
    name = run.partition(":")[2].replace("_", " ")
    run = f"gpu_steps.{run}"
    name = f"question, {framework}: {name}"
    return Step(name, "gpu-questions", run, seconds, framework, (framework,), cuda)


def _features(name: str, part: str, function: str, seconds: int, *needs: str) -> Step:
    run = f"gpu_steps.torch_features:{function}"
    return Step(name, part, run, seconds, "torch", (*TORCH, *needs))


def _tests(framework: str, seconds: int) -> Step:
    needs = (framework, "pytest", "hypothesis")
    run = "gpu_steps.tests:run"
    args = {"framework": framework}
    return Step(f"tests: {framework}", "gpu-tests", run, seconds, "tests", needs, args=args)


def _steps() -> Iterator[Step]:
    yield Step("machine", "gpu-machine", "gpu_steps.machine:look", 40, "machine")
    yield _tests("torch", 160)
    yield _tests("jax", 160)
    yield Step("ops, torch", "exactness", "gpu_steps.exactness:compare", 90, "ops", TORCH)
    yield _features("seeing, torch", "seeing", "seeing", 90, "jax", "flax", "optax", "rich")
    yield _features("low weights, torch", "low-weights", "low_weights", 90)
    yield _features("policies, torch", "policies", "policies", 90, "jax", "flax", "optax")
    yield Step(
        "fp8 layers, torch", "fp8-layers", "gpu_steps.torch_programs:fp8_layers", 150,
        "torch speed", ("torch", "jax", "flax", "rich", "tqdm", "matplotlib"), cuda=True,
    )  # fmt: skip
    yield _torch_speed("train", 60)
    yield _torch_speed("mlp 1", 40)
    yield _torch_speed("train deep", 60)
    yield _jax_speed("train", 90)
    yield _ask("torch_scaler:scaler_steps", 40, cuda=False)
    yield _jax_speed("convnet", 90)
    yield _ask("jax_questions:convolutions", 60, cuda=False)
    yield Step("fp8, torch", "fp8", "gpu_steps.fp8:in_torch", 20, "torch", TORCH)
    yield Step("fp8, JAX", "fp8", "gpu_steps.fp8:in_jax", 45, "jax", JAX)
    yield _torch_speed("accumulate", 40)
    yield _torch_speed("decode", 60)
    yield _torch_speed("lora", 40)
    yield _ask("torch_scaler:launches", 30)
    yield _ask("torch_questions:writes", 40, cuda=False)
    yield _ask("torch_questions:recurrent", 30)
    yield _ask("jax_questions:host_reads", 45)
    yield _ask("jax_questions:long_sums", 45, cuda=False)
    yield _jax_speed("decode", 60)
    yield _jax_speed("scaler 64", 60)
    yield _torch_speed("train", 120, "inductor")
    yield _torch_speed("train", 120, "reduce-overhead")
    yield _torch_speed("mlp 1", 60, "reduce-overhead")
    yield Step(
        "overhead, torch", "torch-overhead", "gpu_steps.torch_programs:overhead", 90,
        "overhead", ("torch", "rich", "tqdm", "matplotlib"),
    )  # fmt: skip
    yield Step(
        "scaler, torch", "scaler", "gpu_steps.torch_programs:scaler", 40,
        "scaler", ("torch", "jax", "optax", "flax", "rich"),
    )  # fmt: skip
    yield Step(
        "contraction", "contraction", "gpu_steps.jax_programs:contraction", 120,
        "jax", ("jax", "rich"),
    )  # fmt: skip
    yield _jax_speed("sharded", 60)
    yield _jax_speed("lora", 60)
    yield _jax_speed("accumulate", 60)
    yield _ask("torch_scaler:graphs_skipped", 90)
    yield _ask("jax_questions:sharded_sums", 30, cuda=False)
    yield _torch_speed("mlp 8", 20)
    yield _torch_speed("mlp 32", 20)
    yield _torch_speed("accumulate short", 30)
    yield _torch_speed("lora short", 30)
    yield _torch_speed("convnet train", 40)
    yield _torch_speed("convnet", 30)
    yield _torch_speed("mlp 1", 60, "inductor")
    yield _jax_speed("mlp", 45)
    yield _jax_speed("train scanned", 60)
    yield _ask("torch_questions:sanitizer", 120)
    yield _torch_speed("train deep", 180, "inductor")


STEPS = tuple(_steps())

# What a step measures beside polymp where it is installed; it runs without them, too.
RIVALS = ("accelerate", "lightning-fabric", "jmp", "mixed-precision-for-JAX", "jaxamp")
