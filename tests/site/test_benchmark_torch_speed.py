"""The programs of benchmarks/torch_speed.py compute the same, and its rows have bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import need
from tests.support.benchmarks import benchmark

OURS = ("polymp", "frozen")
WORKLOADS = (
    "mlp 1", "mlp 8", "mlp 32", "mlp 64", "train", "train deep", "accumulate", "accumulate short",
    "decode", "generate", "convnet train", "convnet", "lora", "lora short",
)  # fmt: skip


@pytest.fixture(scope="module")
def workloads() -> ModuleType:
    for name in ("torch", "matplotlib", "rich", "tqdm"):
        need(name)
    return benchmark("workloads_torch")


@pytest.fixture(scope="module")
def speed(workloads: ModuleType) -> ModuleType:
    return benchmark("torch_speed")


@pytest.fixture(scope="module", autouse=True)
def one_thread(workloads: ModuleType) -> Iterator[None]:
    """More wait for each other where other tests run beside them."""
    before = workloads.torch.get_num_threads()
    workloads.torch.set_num_threads(1)
    yield
    workloads.torch.set_num_threads(before)


def three(workloads: ModuleType, workload: str, way: str) -> list[Any]:
    """Return the results of three runs: losses of a training, or scores."""
    program = workloads.make(workload, way, workloads.SMALL, "cpu")
    try:
        return [program.once().detach().clone() for _ in range(3)]
    finally:
        program.stack.close()


def same(a: list[Any], b: list[Any]) -> bool:
    import torch

    return all(x.dtype is y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_every_workload_is_tested(workloads: ModuleType, speed: ModuleType) -> None:
    assert tuple(workloads.WORKLOADS) == tuple(speed.PLANS) == WORKLOADS


@pytest.mark.parametrize("workload", WORKLOADS)
def test_polymp_gives_the_bits_of_torch(
    workloads: ModuleType, speed: ModuleType, workload: str
) -> None:
    wanted = three(workloads, workload, "torch.autocast")
    ways = ("polymp", *(way for way in speed.PLANS[workload].ways if way in OURS))
    for way in ways:
        assert same(three(workloads, workload, way), wanted), way


@pytest.mark.parametrize("workload", WORKLOADS)
def test_by_hand_is_low_and_near(workloads: ModuleType, workload: str) -> None:
    import torch

    wanted = three(workloads, workload, "fp32")
    found = three(workloads, workload, "by hand")
    assert not same(found, wanted), "nothing was low"
    assert not same(three(workloads, workload, "torch.autocast"), wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("workload", ["train", "accumulate", "convnet train", "lora"])
@pytest.mark.parametrize("way", ["fp32", "by hand", "by hand, float32 gradients", "torch.autocast"])
def test_training_trains(workloads: ModuleType, workload: str, way: str) -> None:
    program = workloads.make(workload, way, workloads.SMALL, "cpu")
    first, *_, last = (program.once().item() for _ in range(6))
    assert last < first


def test_float16_with_a_scaler_is_torchs(workloads: ModuleType, speed: ModuleType) -> None:
    theirs, ours = speed.HALVES
    assert same(three(workloads, "train", ours), three(workloads, "train", theirs))


def test_lora_trains_the_adapters_alone(workloads: ModuleType) -> None:
    import torch

    size = workloads.SMALL
    layer = torch.nn.Linear(size.width, size.width)
    adapted = workloads.Adapted(layer, size.rank)
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained == {"down.weight", "up.weight"}


def test_decoding_is_the_model(workloads: ModuleType) -> None:
    """Token by token, with a cache, the scores of the last token are those of the whole text."""
    import torch

    torch.manual_seed(1)
    size = workloads.SMALL
    model = workloads.transformer(size).eval()
    tokens = torch.randint(size.alphabet, (1, size.context))
    shape = (1, size.heads, 0, size.width // size.heads)
    cache = [torch.empty(shape) for _ in range(2 * size.layers)]
    decoder = workloads.Decoder(model)
    with torch.no_grad():
        for token in tokens.split(1, 1):
            scores, *cache = decoder(token, *cache)
        torch.testing.assert_close(scores[:, 0], model(tokens)[:, -1])


class InProcess:
    """A worker without a process of its own."""

    def __init__(self, module: ModuleType, failed: Any) -> None:
        self.module, self.failed = module, failed

    def __call__(self, way: str, device: str, size: Any, *_: object) -> InProcess:
        made = InProcess(self.module, self.failed)
        made.way, made.worker = way, self.module.Worker(way, device, size)
        return made

    way: str
    worker: Any
    process = type("Process", (), {"poll": staticmethod(lambda: None)})

    def send(self, **request: Any) -> None:
        self.request = json.loads(json.dumps(request))

    def receive(self) -> Any:
        try:
            return json.loads(json.dumps(self.worker.answer(**self.request)))
        except Exception as error:
            raise self.failed(f"{type(error).__name__}: {error}") from error

    def ask(self, **request: Any) -> Any:
        self.send(**request)
        return self.receive()

    def seconds(self) -> float:
        return float(self.ask(do="run"))

    def close(self) -> None:
        self.worker.drop()


@pytest.mark.long
def test_it_runs_and_says_what_is_missed_and_missing(
    speed: ModuleType,
    workloads: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(speed, "Worker", InProcess(workloads, speed.Failed))
    monkeypatch.setattr(
        speed,
        "BARS",
        {
            "mlp 1: frozen / torch.autocast": 0.0,
            "mlp 1: unheard of / torch.autocast": 1.0,
            "lora: frozen / torch.autocast": 0.0,
        },
    )
    ways = ("frozen", "TransformerEngine", "Apex O1")
    plan = speed.Plan("MLP of {linears}", ways, (), 2, (1,))
    monkeypatch.setattr(speed, "PLANS", {"mlp 1": plan})
    out = tmp_path / "x.json"
    command = "torch_speed.py --small --eager --rounds 3 --device cpu --workloads"
    monkeypatch.setattr(sys, "argv", [*command.split(), "mlp 1", "--out", str(out)])
    assert speed.main() == 1
    record = json.loads(out.read_text())
    rows = record["tables"]["MLP of 2"]
    assert [r["what"] for r in rows] == [
        "mlp 1: fp32 / torch.autocast",
        "mlp 1: by hand / torch.autocast",
        "mlp 1: polymp / torch.autocast",
        "mlp 1: frozen / torch.autocast",
        "mlp 1: frozen / by hand",
    ]
    assert [r["bar"] for r in rows] == [None, None, None, 0.0, None]
    assert all(r["ratio"] > 0 for r in rows)
    assert record["missed"] == ["mlp 1: frozen / torch.autocast"]
    assert record["unmeasured"] == {"mlp 1: unheard of / torch.autocast": 1.0}
    engine = "RuntimeError: it runs on CUDA, not on cpu"
    assert record["missing"]["TransformerEngine (mlp 1)"] == engine
    assert record["missing"]["Apex O1 (mlp 1)"].startswith("RuntimeError: No module named 'apex'")
    assert record["missing"]["compiled programs"] == "--eager was asked for"
    assert record["size"] == dict(vars(workloads.SMALL))
    said = capsys.readouterr().out
    assert f"Not measured: TransformerEngine (mlp 1): {engine}" in said
    assert "Bars missed: mlp 1: frozen / torch.autocast." in said


def test_figures_of_tiny_models_are_not_kept(
    speed: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["torch_speed.py", "--small"])
    with pytest.raises(SystemExit):
        speed.main()
    assert "--small: give --out" in capsys.readouterr().err


def test_compiled_ways_are_compared_with_compiled_ones(speed: ModuleType) -> None:
    found = {f"{way}, compiled": [1.0] for way in ("fp32", "by hand", "torch.autocast", "frozen")}
    assert [r.what for r in speed.compared("w", found)] == [
        "w: fp32, compiled / torch.autocast, compiled",
        "w: by hand, compiled / torch.autocast, compiled",
        "w: frozen, compiled / torch.autocast, compiled",
        "w: frozen, compiled / by hand, compiled",
    ]


def test_a_reason_is_said_once_a_way(speed: ModuleType) -> None:
    missing = {"a: x": "gone", "b: x": "gone", "c: x": "broken", "compiled programs": "none"}
    assert speed.once_a_way(missing) == {
        "x (a, b)": "gone",
        "x (c)": "broken",
        "compiled programs": "none",
    }


def test_every_bar_has_its_row(speed: ModuleType) -> None:
    """With every way that is planned, each bar's row is made."""
    whats = set()
    for name, plan in speed.PLANS.items():
        ways = ("fp32", "by hand", "torch.autocast", "polymp", *plan.ways)
        for some in (ways, [way + speed.COMPILED for way in plan.compiled]):
            whats |= {r.what for r in speed.compared(name, {way: [1.0] for way in some})}
    for name, ways in speed.PEAKS.items():
        found = {way: [1.0] for way in ("torch.autocast", *ways)}
        whats |= {r.what for r in speed.compared(f"peak memory, {name}", found, "MB")}
    assert set(speed.BARS) <= whats


@pytest.mark.long  # a process with torch; the one below ends with an error, too
def test_a_process_says_why_it_cannot(speed: ModuleType, workloads: ModuleType) -> None:
    worker = speed.Worker("Apex O1", "cpu", workloads.SMALL, sys.executable)
    try:
        with pytest.raises(speed.Failed, match=r"^RuntimeError: .*no package registry has it"):
            worker.ask(do="make", workload="train")
        with pytest.raises(speed.Failed, match="'fly': a worker can make, run, drop"):
            worker.ask(do="fly")
    finally:
        worker.close()


def test_a_process_that_ends_says_its_last_line(speed: ModuleType, tmp_path: Path) -> None:
    dying = tmp_path / "dying"
    dying.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('the disk is full')\n")
    dying.chmod(0o755)
    worker = speed.Worker("fp32", "cpu", speed.SMALL, str(dying))
    try:
        with pytest.raises(speed.Failed, match="ended with exit code 1: the disk is full"):
            worker.ask(do="run")
    finally:
        worker.close()
