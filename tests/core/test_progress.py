"""Progress is shown on a terminal alone, after two seconds, without a thread; it leaves nothing."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace

import pytest

from polymp import cli, progress


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Stream:
    pytest.importorskip("tqdm")
    stream = Stream(terminal=True)
    # Not sys.stderr itself, which pytest sets anew when the test begins.
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))
    monkeypatch.setattr(progress, "AFTER", -1.0)
    return stream


def counted(steps: int = 5) -> None:
    with progress.line("locate", steps, "op") as line:
        for _ in range(steps):
            line.step()


def test_shown_on_a_terminal_without_a_thread_and_gone_at_the_end(terminal: Stream) -> None:
    before = threading.enumerate()
    with progress.line("locate", 5, "op") as line:
        for _ in range(5):
            line.step()
        assert threading.enumerate() == before
    text = terminal.getvalue()
    assert "locate" in text
    assert "/5" in text
    assert text.endswith("\r"), "the line is wiped, and the cursor at its beginning"
    assert not text.split("\r")[-2].strip()


def test_a_stage_is_told_at_once(terminal: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER", 1e9)
    with progress.line("audit") as line:
        line.step()
        assert terminal.getvalue() == ""
        line.stage("compiling")
        assert "audit: compiling ..." in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")


@pytest.mark.parametrize("lacking", ["terminal", "tqdm", "console"])
def test_nothing_without(lacking: str, terminal: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacking == "tqdm":
        monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    elif lacking == "console":
        monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=None))
    terminal.terminal = lacking != "terminal"
    counted()
    assert terminal.getvalue() == ""


def test_an_error_leaves_no_line(terminal: Stream) -> None:
    def broken() -> None:
        with progress.line("locate") as line:
            line.step()
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert terminal.getvalue().endswith("\r")


# Those who show it.


def test_torch(terminal: Stream) -> None:
    torch = pytest.importorskip("torch")
    import polymp.torch

    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    x = torch.ones(1, 2)
    for what, call in (
        ("explain", lambda: polymp.torch.explain(net, x)),
        ("locate", lambda: polymp.torch.locate(net, x)),
    ):
        terminal.truncate(0)
        call()
        assert what in terminal.getvalue()
    terminal.truncate(0)
    with polymp.torch.audit(net):
        net(x).sum().backward()
    assert "audit" in terminal.getvalue()
    assert "audit, reading" in terminal.getvalue()


def test_jax(terminal: Stream) -> None:
    jax = pytest.importorskip("jax")
    import polymp.jax

    f = jax.jit(polymp.jax.autocast(lambda x: (x @ x).sum(), dtype="bfloat16"))
    x = jax.numpy.ones((2, 2))
    for what, call in (
        ("tracing", lambda: polymp.jax.explain(f, x)),
        ("locate: compiling", lambda: polymp.jax.locate(f, x)),
        ("audit: compiling", lambda: polymp.jax.audit(f)(x)),
    ):
        terminal.truncate(0)
        call()
        assert what in terminal.getvalue()


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("check amp --backend torch", "check: asking torch"),
        ("doctor --json", "doctor: asking the frameworks"),
    ],
)
def test_commands(argv: str, told: str, terminal: Stream) -> None:
    pytest.importorskip("torch")
    assert cli.main(argv.split()) == 0
    text = terminal.getvalue()
    assert f"polymp {told} ..." in text
    assert text.endswith("\r"), "the line is wiped, and the cursor at its beginning"
    assert not text.split("\r")[-2].strip()
