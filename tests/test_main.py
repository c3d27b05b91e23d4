"""The two commands: a demo that fails when something is wrong, a doctor that never does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from breakable_cuda_graphs import demo, doctor
from breakable_cuda_graphs.__main__ import main
from breakable_cuda_graphs._driver import bindings
from breakable_cuda_graphs.doctor import GATES, CheckResult, FeatureGate, Verdict
from breakable_cuda_graphs.simulator import SimulatedDriver, simulated_device

Capture = pytest.CaptureFixture[str]
driver_types = bindings.types


@pytest.fixture(autouse=True)
def no_variable_and_no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of this machine's environment chooses; the driver in use stays as it was."""
    monkeypatch.delenv(bindings.SIMULATOR_VARIABLE, raising=False)
    before = bindings.use(None)
    yield
    bindings.use(before)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where torch is not installed."""
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where neither torch nor the driver finds a GPU."""
    torch = sys.modules.get("torch")
    if torch is not None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bindings, "types", NoDriver())


class NoDriver:
    """The bindings' module where no driver is installed: types are there, calls raise."""

    def __getattr__(self, name: str) -> Any:
        return getattr(driver_types, name)

    def cuDriverGetVersion(self) -> Any:
        raise RuntimeError("no library libcuda.so.1")


def run_module(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """`python -m breakable_cuda_graphs ...` in a fresh process; `before` is run first."""
    code = f"{before}\nimport runpy; runpy.run_module('breakable_cuda_graphs', run_name='__main__')"
    path = os.pathsep.join(part for part in sys.path if part)
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": path},
    )


# ---------------------------------------------------------------- demo


def test_the_demo_runs_as_a_command_and_says_where() -> None:
    done = run_module("demo", "--simulated")
    assert done.returncode == 0, done.stderr[-2000:]
    has_torch = importlib.util.find_spec("torch") is not None
    why = "as asked" if has_torch else "torch is not installed"
    assert done.stdout.startswith(f"SIMULATED DEVICE ({why})")
    assert "All 4 results are right." in done.stdout
    assert done.stderr == ""


def test_without_torch_the_demo_uses_plain_driver_calls() -> None:
    done = run_module("demo", "--simulated", before="import sys; sys.modules['torch'] = None")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "driver calls on a stream" in done.stdout
    assert "All 4 results are right." in done.stdout


def test_the_variable_chooses_the_simulated_device(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(bindings.SIMULATOR_VARIABLE, "1")
    assert main(["demo"]) == 0
    assert "SIMULATED DEVICE" in capsys.readouterr().out


def test_without_a_gpu_the_demo_says_that_it_is_simulated(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    assert "SIMULATED DEVICE" in shown
    assert "finds no CUDA device" in shown


def test_the_inputs_of_the_demo_take_both_branches() -> None:
    torch = pytest.importorskip("torch")
    with simulated_device():
        outcomes = list(demo.run_torch(torch, "cpu"))
    assert {value > 0 for value, _, _ in outcomes} == {True, False}
    assert [expected for _, _, expected in outcomes] == [17.0, 25.0, 3.0, 7.0]


def test_the_neutral_demo_takes_both_branches_and_leaves_no_memory() -> None:
    with simulated_device() as device:
        outcomes = list(demo.run_neutral())
        assert device.findings == []
        assert not [leak for leak in device.leaks() if "memory" in leak]
    assert {value < 100 for value, _, _ in outcomes} == {True, False}
    assert [result for _, result, _ in outcomes] == [42, 21, 0, 0]


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [([(1.0, 2.0, 2.0)], 0), ([(1.0, 2.0, 2.0), (1.0, 2.0, 3.0)], 1), ([], 1)],
)
def test_a_wrong_result_or_none_makes_the_demo_fail(
    outcomes: list[demo.Outcome], status: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "run_neutral", lambda: iter(outcomes))
    assert main(["demo", "--simulated", "--neutral"]) == status
    assert ("WRONG" in capsys.readouterr().out) == bool(status)


def test_a_result_that_is_not_a_number_is_wrong() -> None:
    said: list[str] = []
    assert demo._report("", [(1.0, float("nan"), 2.0)], said.append) == 1


def test_a_misused_driver_makes_the_demo_fail(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def misused() -> Iterator[Any]:
        with simulated_device() as device:
            yield types.SimpleNamespace(findings=[*device.findings, "a stream was used twice"])

    monkeypatch.setattr(demo, "simulated_device", misused)
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--simulated", "--neutral"])
    assert caught.value.code == 1
    assert "a stream was used twice" in capsys.readouterr().out


@pytest.mark.gpu
def test_on_a_gpu_the_demo_runs_there(capsys: Capture) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert main(["demo"]) == 0
    assert torch.cuda.get_device_name() in capsys.readouterr().out


@pytest.mark.gpu
def test_on_a_gpu_the_neutral_demo_runs_there(capsys: Capture) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert main(["demo", "--neutral"]) == 0
    assert "SIMULATED" not in capsys.readouterr().out


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize("arguments", [[], ["cure"], ["demo", "--fast"]])
def test_a_command_that_does_not_exist_is_refused(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


# ---------------------------------------------------------------- doctor


def marks(title: str) -> dict[str, Verdict]:
    """The findings of one part, by what they speak of."""
    return {finding.what: finding.verdict for finding in dict(doctor.examine())[title]}


def test_the_doctor_runs_as_a_command() -> None:
    done = run_module("doctor")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    for part in ("Needed", "Features", "torch", "Other libraries", "Tried here", "Environment"):
        assert f"\n{part}" in done.stdout
    assert doctor.RUN_ON_A_DEVICE in done.stdout
    assert done.stderr == ""


def test_the_doctor_runs_without_any_optional_library() -> None:
    hide = "import sys; sys.modules.update(dict.fromkeys(('torch', 'cupy', 'numba')))"
    done = run_module("doctor", before=hide)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "torch: not installed" in done.stdout
    assert "CuPy: not installed" in done.stdout


@pytest.mark.usefixtures("no_gpu")
def test_a_missing_driver_is_an_answer_with_advice(capsys: Capture) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "--  CUDA driver: no library libcuda.so.1" in shown
    assert bindings.SIMULATOR_VARIABLE in shown
    assert "the driver alone" not in shown


@pytest.mark.usefixtures("no_gpu")
def test_without_a_driver_the_neutral_demo_says_that_it_is_simulated(capsys: Capture) -> None:
    assert main(["demo", "--neutral"]) == 0
    shown = capsys.readouterr().out
    assert "SIMULATED DEVICE" in shown
    assert "no driver answers: no library libcuda.so.1" in shown


def test_what_works_is_tried(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run_neutral", lambda: iter([(1.0, 2.0, 3.0)]))
    assert main(["doctor"]) == 1
    assert "2 for 1, where 3 is right" in capsys.readouterr().out


def test_a_check_that_fails_is_a_finding(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[CheckResult]:
        yield CheckResult(Verdict.OK, "the first half")
        raise OSError("no such thing")

    monkeypatch.setattr(doctor, "_torch", broken)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "OSError: no such thing" in shown
    assert "the first half" in shown
    assert "Environment" in shown, "the report ended early"


@pytest.mark.usefixtures("no_torch")
def test_a_missing_torch_is_no_fault() -> None:
    assert marks("torch") == {"torch": Verdict.ABSENT}


def test_a_torch_that_is_too_old_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__="2.9.1+cu128"))
    [finding] = doctor._torch()
    assert finding.verdict is Verdict.BAD
    assert "2.10" in finding.advice


def fake_torch(version: str, allocator: str = "native") -> Any:
    cuda = types.SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, get_allocator_backend=lambda: allocator
    )
    return types.SimpleNamespace(
        __version__=version, cuda=cuda, version=types.SimpleNamespace(cuda="13.0")
    )


@pytest.mark.parametrize(
    ("version", "random_numbers", "pinned"),
    [
        ("2.10.0", "one capture at a time", Verdict.ABSENT),
        ("2.11.0+cu130", "one capture at a time", Verdict.OK),
        ("2.12.1", "each capture has its own", Verdict.OK),
        ("2.14.0a0+git123", "each capture has its own", Verdict.OK),
    ],
)
def test_what_torch_can_do_goes_by_its_version(
    version: str, random_numbers: str, pinned: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(version))
    findings = {finding.what: finding for finding in doctor._torch()}
    assert findings["random numbers"].detail.startswith(random_numbers)
    assert findings["pinned memory in captures"].verdict is pinned
    assert findings["torch's CUDA"].detail == "built for 13.0, 2 device(s)"


def test_the_asynchronous_allocator_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch("2.11.0", "cudaMallocAsync"))
    assert [f.verdict for f in doctor._torch() if f.what == "torch's allocator"] == [Verdict.BAD]


@pytest.mark.parametrize(("version", "verdict"), [("13.6.0", Verdict.BAD), ("14.1.0", Verdict.OK)])
def test_cupy_is_judged_by_its_version(
    version: str, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(__version__=version))
    assert doctor.CUPY.judge()[1].verdict is verdict


@pytest.mark.parametrize(
    ("version", "sound"),
    [
        ((12, 8, 0), False),
        ((12, 9, 6), False),
        ((12, 9, 7), True),
        ((12, 9, 10), True),
        ((13, 0, 3), False),
        ((13, 2, 0), False),
        ((13, 3, 0), True),
        ((13, 5), True),
        ((14, 0, 0), False),
    ],
)
def test_bindings_that_read_freed_edges_are_told_apart(
    version: tuple[int, ...], sound: bool
) -> None:
    assert doctor.bindings_are_sound(version) is sound


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("2.13.0+cpu", (2, 13, 0)),
        ("2.14.0a0+git", (2, 14, 0)),
        ("14.0.1rc1", (14, 0, 1)),
        ("?", ()),
    ],
)
def test_versions_are_read_as_numbers(text: str, version: tuple[int, ...]) -> None:
    assert doctor.numbers(text) == version


def test_a_gate_needs_both_the_bindings_and_the_driver() -> None:
    gate = FeatureGate("ids", ("cuGraphGetId",), 13010, "Names nodes.")
    knows, lacks = types.SimpleNamespace(cuGraphGetId=None), types.SimpleNamespace()
    assert gate.judge(knows, 13010).verdict is Verdict.OK
    assert "13.1; here it is 13.0" in gate.judge(knows, 13000).detail
    assert gate.judge(lacks, 13020).detail == "these cuda-bindings have no cuGraphGetId"


def test_the_gates_ask_for_functions_that_the_bindings_have_had() -> None:
    """A misspelt function would close its gate for ever."""
    if bindings.binding_version() < (13, 3):
        pytest.skip("older bindings lack some")
    for gate in GATES:
        for name in gate.functions:
            assert hasattr(bindings.types, name), name


# A simulated driver in the place of the real one shows what the doctor says where one answers.


@pytest.fixture
def answering_driver(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> SimulatedDriver:
    driver = SimulatedDriver(seed=1, devices=2)
    monkeypatch.setattr(bindings, "types", driver)
    return driver


@pytest.mark.usefixtures("answering_driver")
def test_a_driver_that_answers_is_shown_with_its_devices() -> None:
    needed = marks("Needed")
    assert needed["CUDA driver 13.0"] is Verdict.OK
    assert needed["device 0"] is needed["device 1"] is Verdict.OK


@pytest.mark.usefixtures("answering_driver")
def test_a_driver_that_answers_is_tried() -> None:
    assert marks("Tried here")["capture, break, replay: the driver alone"] is Verdict.OK


@pytest.mark.usefixtures("answering_driver")
def test_features_go_by_the_driver_that_answers() -> None:
    features = marks("Features of driver and bindings")
    assert features["conditional nodes: ELSE in child graphs"] is Verdict.OK
    assert features["cuGraphNodeGetParams"] is Verdict.ABSENT


def test_a_driver_that_is_too_old_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimulatedDriver(seed=1, driver_version=12020)
    monkeypatch.setattr(bindings, "types", driver)
    assert marks("Needed")["CUDA driver 12.2"] is Verdict.BAD


def test_the_driver_in_use_is_the_same_after_the_doctor() -> None:
    with simulated_device():
        before = bindings.current()
        list(doctor.examine())
        assert bindings.current() is before


@pytest.mark.parametrize("name", ["PYTORCH_NO_CUDA_MEMORY_CACHING"])
def test_a_variable_that_forbids_captures_is_a_fault(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert marks("Environment")[f"{name}=1"] is Verdict.BAD
