"""The self-check on gloo: clean where nothing is wrong, and each planted fault is found, also one that hangs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_fsdp2.cli import doctor, main
from mindspeed_fsdp2.doctor import launch
from mindspeed_fsdp2.doctor import rank as rank_module
from mindspeed_fsdp2.doctor.board import Board, file_connection
from mindspeed_fsdp2.doctor.checks import Check, Context, WrongResult
from mindspeed_fsdp2.doctor.collectives import compare, expected, values_of
from mindspeed_fsdp2.doctor.facts import relevant
from mindspeed_fsdp2.doctor.pinning import checks as pinning_checks
from mindspeed_fsdp2.doctor.report import Outcome, Report, summarise
from mindspeed_fsdp2.doctor.runner import perform
from mindspeed_fsdp2.errors import FSDP2Error

ROOT = Path(__file__).parents[2]
LIMIT_S = 100  # for all ranks of one run, on a loaded machine


def no_fault() -> None:
    pass


def wrong_average() -> None:
    """Averages of bf16 are sums."""
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op == dist.ReduceOp.AVG and tensor.dtype == torch.bfloat16:
            op = dist.ReduceOp.SUM
        return real(tensor, op, group, async_op)

    dist.all_reduce = all_reduce


def missing_reduction() -> None:
    """Rank 1 keeps its own int64 values although everybody takes part."""
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        lost = tensor.dtype == torch.int64 and dist.get_rank() == 1
        return real(tensor.clone() if lost else tensor, *args, **kwargs)

    dist.all_reduce = all_reduce


def no_such_dtype() -> None:
    """Neither bf16, which training needs, nor float64, which it does not."""
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):  # the newer name, and the older one
        if hasattr(dist, name):
            setattr(dist, name, _refusing(getattr(dist, name)))


def _refusing(real: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_scatter(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.dtype in (torch.bfloat16, torch.float64):
            raise RuntimeError(f"Unsupported data type\n{input.dtype}")
        return real(output, input, *args, **kwargs)

    return reduce_scatter


def hanging() -> None:
    """Rank 1 never comes to the broadcast of float16."""
    real = dist.broadcast

    def broadcast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.float16 and dist.get_rank() == 1:
            threading.Event().wait()
        return real(tensor, *args, **kwargs)

    dist.broadcast = broadcast


def dying() -> None:
    """Rank 1 ends without a word."""
    real = dist.broadcast

    def broadcast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.float16 and dist.get_rank() == 1:
            os._exit(3)
        return real(tensor, *args, **kwargs)

    dist.broadcast = broadcast


def _rank(plant: Callable[[], None], rank: int, ranks: int, folder: str, arguments: list[str]) -> None:
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    plant()
    with open(f"{folder}/out{rank}", "w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
        status = main(["doctor", "--device-type", "cpu", "--store", f"{folder}/store", *arguments])
    sys.exit(status)


def examine(plant: Callable[[], None], folder: Path, *arguments: str, ranks: int = 2) -> tuple[list[int | None], str]:
    """Run the command on ``ranks`` processes; return their exit codes and what rank 0 printed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "mindspeed_fsdp2.wrap"])
    processes = [
        context.Process(target=_rank, args=(plant, rank, ranks, str(folder), list(arguments)), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert all((folder / f"out{rank}").read_text("utf-8") == "" for rank in range(1, ranks))
    return codes, (folder / "out0").read_text("utf-8")


def lines_of(text: str) -> dict[str, tuple[str, str]]:
    """Return verdict and detail by the name of the check."""
    found = re.findall(r"^  (ok|skipped|absent|FAIL|HANGS) +([^:\n]+)(?:: (.*))?$", text, re.MULTILINE)
    return {name: (verdict, detail) for verdict, name, detail in found}


def wrong(text: str) -> list[str]:
    return [name for name, (verdict, _) in lines_of(text).items() if verdict in ("FAIL", "HANGS")]


def test_nothing_is_wrong_on_four_ranks(tmp_path: Path) -> None:
    codes, text = examine(no_fault, tmp_path, ranks=4)
    assert codes == [0, 0, 0, 0], text
    lines = lines_of(text)
    assert wrong(text) == [] and text.endswith(
        f"result: {sum(v == 'ok' for v, _ in lines.values())} passed, nothing wrong\n"
    )
    skipped = {name for name, (verdict, _) in lines.items() if verdict == "skipped"}
    assert skipped == {
        "all_reduce SUM float32 in host memory",
        "all_reduce MAX float32 in host memory",
        "pinned memory",
        "training with shards in pinned host memory equals DDP",
    }
    assert lines["mesh of replicas and shards (HSDP)"] == ("ok", "shape (2, 2)")
    assert lines["checkpoint saved and loaded again"] == ("ok", "1225 elements equal to the last bit")
    for name in ("sharded over all ranks", "with replicas and shards (HSDP)", "with prefetch and recompute"):
        verdict, detail = lines[f"training {name} equals DDP"]
        assert verdict == "ok" and detail in ("equal to the last bit", "equal to rounding")
    assert f"  torch            {torch.__version__}\n" in text and "  device type  cpu\n" in text


def test_a_wrong_average_is_found(tmp_path: Path) -> None:
    codes, text = examine(wrong_average, tmp_path)
    if lines_of(text)["all_reduce AVG float32"][0] == "absent":  # gloo of torch 2.7: training asks for no average
        mended = "gloo of this PyTorch cannot average; training sums and divides instead"
        assert codes == [0, 0] and lines_of(text)["all_reduce AVG bfloat16"] == ("absent", mended)
        return
    assert codes == [1, 1]
    assert wrong(text) == ["all_reduce AVG bfloat16"]
    assert lines_of(text)["all_reduce AVG bfloat16"] == (
        "FAIL",
        "the result: element 0 is 5 and should be 2.5 (1031 of 1031 are wrong)",
    )
    assert text.endswith("1 wrong: all_reduce AVG bfloat16\n")


def test_a_missing_reduction_is_found(tmp_path: Path) -> None:
    codes, text = examine(missing_reduction, tmp_path)
    assert codes == [1, 1]
    assert {"all_reduce SUM int64", "all_reduce MAX int64"} <= set(wrong(text))
    assert lines_of(text)["all_reduce SUM int64"] == (
        "FAIL",
        "rank 1: the result: element 0 is 4 and should be 5 (1031 of 1031 are wrong)",
    )


def test_a_missing_dtype_is_found_where_training_needs_it(tmp_path: Path) -> None:
    codes, text = examine(no_such_dtype, tmp_path)
    assert codes == [1, 1]
    lines = lines_of(text)
    averages = lines["all_reduce AVG float32"][0] == "ok"  # those of gloo in torch 2.7 are never asked for
    assert wrong(text) == ["reduce_scatter SUM bfloat16", *(["reduce_scatter AVG bfloat16"] if averages else [])]
    assert lines["reduce_scatter SUM bfloat16"][1] == "RuntimeError: Unsupported data type torch.bfloat16"
    assert lines["reduce_scatter SUM float64"] == ("absent", "RuntimeError: Unsupported data type torch.float64")


def test_a_hanging_collective_is_named_with_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    codes, text = examine(hanging, tmp_path, "--timeout", "10", "--folder", str(tmp_path / "shared"))
    assert codes == [1, 1]
    assert list((tmp_path / "shared").iterdir()) == []
    verdict, detail = lines_of(text)["broadcast float16"]
    assert verdict == "HANGS"
    first, second = detail.split("; ")
    assert first.startswith("rank 0: hangs, no end after 10 s in ") and "broadcast" in first
    assert second.startswith("rank 1: hangs, no end after 10 s in ") and second.endswith(")")
    assert "broadcast (test_doctor.py:" in second
    assert re.search(r"^  not run after that: \d+ checks, from 'all_gather int64' on$", text, re.MULTILINE)
    assert "1 wrong: broadcast float16" in text


def test_a_rank_that_ends_is_named(tmp_path: Path) -> None:
    codes, text = examine(dying, tmp_path, "--timeout", "10")
    assert codes == [1, 3]
    verdict, detail = lines_of(text)["broadcast float16"]
    assert verdict == "HANGS" and detail.endswith("rank 1: no answer")


def context_of(device: str) -> Context:
    return Context(0, 1, torch.device(device), True, None)


def test_broken_pinning_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = pinning_checks()
    assert perform(check, context_of("cpu")) == Outcome("skipped", "no accelerator")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: False)
    unpinned = "pin_memory() returned memory that is not pinned. Set pin_memory: false"
    assert perform(check, context_of("cuda")) == Outcome("FAIL", unpinned)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1)
    assert perform(check, context_of("cuda")) == Outcome("FAIL", "pin_memory() changed the values")


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 36])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_right_values_pass_and_wrong_ones_do_not(ranks: int, dtype: torch.dtype) -> None:
    every = [values_of(rank, 1031, dtype) for rank in range(ranks)]
    total = torch.stack(every).sum(0, dtype=torch.float64)
    compare(total.to(dtype), expected(ranks, 1031, "SUM"), "sum")
    mean = (total.to(dtype) / ranks).to(dtype) if dtype.is_floating_point else None
    if mean is not None:
        compare(mean, expected(ranks, 1031, "AVG"), "mean")
    if ranks == 1:
        return
    for left_out in range(ranks):
        with pytest.raises(WrongResult, match=r"^sum: element 0 is \d+ and should be \d+ \(1031 of 1031 are wrong\)$"):
            compare((total - every[left_out]).to(dtype), expected(ranks, 1031, "SUM"), "sum")
    if mean is not None:
        with pytest.raises(WrongResult):
            compare(total.to(dtype), expected(ranks, 1031, "AVG"), "mean")
        with pytest.raises(WrongResult):
            compare(torch.full_like(mean, float("nan")), expected(ranks, 1031, "AVG"), "mean")


@pytest.mark.parametrize(
    ("outcomes", "verdict", "detail"),
    [
        ([Outcome("ok", "a"), Outcome("ok", "a")], "ok", "a"),
        ([Outcome("absent", "x"), Outcome("absent", "x")], "absent", "x"),
        ([Outcome("absent", "x"), Outcome("ok")], "FAIL", "rank 0: x"),
        ([Outcome("ok"), Outcome("FAIL", "y"), Outcome("FAIL", "y")], "FAIL", "ranks 1, 2: y"),
        ([Outcome("ok"), None], "HANGS", "rank 1: no answer"),
        ([Outcome("FAIL", "y"), Outcome("HANGS", "z")], "HANGS", "rank 0: y; rank 1: hangs, z"),
        ([Outcome("FAIL", str(n)) for n in range(5)], "FAIL", "rank 0: 0; rank 1: 1; rank 2: 2; and 2 more"),
    ],
)
def test_ranks_are_told_apart(outcomes: list[Outcome | None], verdict: str, detail: str) -> None:
    line = summarise("check", outcomes)
    assert (line.verdict, line.detail) == (verdict, detail)
    report = Report({}, [line])
    assert report.failed == (verdict in ("FAIL", "HANGS"))


def test_whatever_a_check_raises_is_reported() -> None:
    def body(_context: Context) -> str:
        raise ZeroDivisionError("by\n  zero")

    assert perform(Check("x", body), context_of("cpu")) == Outcome("FAIL", "ZeroDivisionError: by zero")
    assert perform(Check("x", body, needed=False), context_of("cpu")).verdict == "absent"


def test_the_environment_in_the_report_holds_no_secrets() -> None:
    given = {
        "HCCL_IF_BASE_PORT": "1",
        "NCCL_API_KEY": "s",
        "HOME": "/root",
        "ASCEND_HOME_PATH": "/a",
        "TORCH_TOKEN": "t",
    }
    assert relevant(given) == {"ASCEND_HOME_PATH": "/a", "HCCL_IF_BASE_PORT": "1"}


@pytest.mark.parametrize(("visible", "ranks"), [(0, 1), (1, 1), (2, 2), (8, 2)])
def test_one_device_gets_one_rank(visible: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert launch.default_ranks("cuda") == ranks
    assert launch.default_ranks("cpu") == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "0"], "argument --ranks: '0' is not a number of ranks. Write 1 or more."),
        (["--timeout", "soon"], "argument --timeout: 'soon' is not a time. Write seconds above 0."),
        (["--timeout", "inf"], "argument --timeout: 'inf' is not a time. Write seconds above 0."),
    ],
)
def test_wrong_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", *arguments])
    assert text in capsys.readouterr().err


def test_ranks_are_the_launchers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--ranks", "2"]) == 1
    assert capsys.readouterr().err == "--ranks: a launcher has started 4 ranks already. Leave it out.\n"


@contextlib.contextmanager
def processes(*programs: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Stand-ins for ranks: Python programs, or "" for one that stays until it is stopped."""
    started = [
        subprocess.Popen([sys.executable, "-S", "-c", program or "input()"], stdin=subprocess.PIPE)
        for program in programs
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


KILLED = "import os; os.kill(os.getpid(), 9)"
STOPPED = "The other ranks did not end by themselves and were stopped."


@pytest.mark.parametrize(
    ("programs", "met", "text"),
    [
        (["", KILLED, ""], False, f"rank 1: ended by signal 9. {STOPPED}"),
        (["", "", "raise SystemExit(1)"], False, f"rank 2: ended with exit status 1. {STOPPED}"),
        (["raise SystemExit(1)", ""], True, f"rank 0: ended with exit status 1. {STOPPED}"),
        (["", KILLED], True, f"rank 1: ended by signal 9. {STOPPED}"),
        (["raise SystemExit(1)", KILLED], True, "rank 0: ended with exit status 1; rank 1: ended by signal 9."),
    ],
)
def test_a_rank_that_ends_is_seen_whichever_it_is(
    programs: list[str], met: bool, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_EARLY_S", 0.5)
    monkeypatch.setattr(launch, "_END_S", 0.5)
    if met:
        (tmp_path / "met").touch()
    with processes(*programs) as started, pytest.raises(FSDP2Error) as caught:
        launch._wait(started, tmp_path / "met", 0.5)
    assert str(caught.value) == text


def test_rank_0_has_its_time_out_besides_to_report_a_rank_that_ended(tmp_path: Path) -> None:
    met = tmp_path / "met"
    assert launch._patience([None, -9], met, 60.0) == launch._EARLY_S == 5.0
    met.touch()
    assert launch._patience([None, -9], met, 60.0) == 90.0
    assert launch._patience([1, None], met, 60.0) == 30.0
    with processes("", "") as started:
        for process in started:
            process.communicate(b"\n")  # an end without a fault
        assert launch._wait(started, met, 60.0) == 0


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    board = Board(file_connection(tmp_path / "store", 3))
    board.put("arrived/1", True)
    text = r"^rank {}: 0.1 s after the start there is nothing from rank 2\. Look at what was said there, and at the network\.$"
    for rank in (0, 1):
        with pytest.raises(FSDP2Error, match=text.format(rank)):
            rank_module._meet(board, rank_module.Place(rank, 3, rank, 3), 0.1)


USE_TORCHRUN = "Start the command with torchrun, which sets these variables, or unset RANK and WORLD_SIZE."


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT is missing"),
        (
            {"RANK": "a", "WORLD_SIZE": "-2"},
            "RANK='a' is no number; WORLD_SIZE='-2' is no number; MASTER_PORT is missing",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_PORT": "0"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "65536"}, "MASTER_PORT=65536 is above 65535"),
    ],
)
def test_a_launchers_wrong_variables(
    variables: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"MASTER_ADDR": "localhost", **variables}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == f"environment: {text}. {USE_TORCHRUN}\n"
    if text == "MASTER_PORT is missing":  # ranks that this command has started meet in a file
        assert rank_module.place(stored=True) == rank_module.Place(0, 2, 0, 2)


def test_ranks_of_a_launcher_that_never_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--device-type", "cpu", "--timeout", "1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("rank 0: the 2 ranks do not find each other (DistStoreError: ") and error.count("\n") == 1
    assert error.endswith("). Look at MASTER_ADDR, MASTER_PORT and the network, and whether every rank was started.\n")


def test_a_device_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def set_device(index: int) -> None:
        raise RuntimeError("invalid device ordinal\nmore")

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--device-type", "cuda", "--store", str(tmp_path / "store")]) == 1
    assert capsys.readouterr().err == (
        "rank 1: cuda:1 cannot be used (RuntimeError: invalid device ordinal). Start no more ranks than there are "
        "devices, or take another --device-type.\n"
    )


@pytest.mark.parametrize("launched", [False, True])
def test_a_folder_that_cannot_be_used(
    launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("ranks were started"))
    arguments = ["doctor", "--device-type", "cpu", "--folder", str(tmp_path / "file" / "x")]
    monkeypatch.delenv("RANK", raising=False)
    if launched:
        for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        arguments += ["--store", str(tmp_path / "store")]
    assert main(arguments) == 1
    assert capsys.readouterr().err == (
        f"--folder: '{tmp_path}/file/x' cannot be written to (NotADirectoryError: Not a directory). Name a directory "
        "that can.\n"
    )


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "run_ranks", interrupted)
    assert main(["doctor", "--device-type", "cpu"]) == 130
    assert capsys.readouterr().err == "mindspeed-fsdp2 doctor: interrupted\n"
    with launch._interrupts_ignored():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, env=environment, check=False
    )


def test_the_command_starts_its_own_ranks(tmp_path: Path) -> None:
    done = command("-m", "mindspeed_fsdp2.cli", "doctor", "--device-type", "cpu", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "  ranks        2\n" in done.stdout and "HANGS" not in done.stdout and wrong(done.stdout) == []
    assert lines_of(done.stdout)["checkpoint saved and loaded again"][0] == "ok"
    assert list(tmp_path.iterdir()) == []  # nothing is left where the user let us write


def test_documented_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(doctor, "run", lambda arguments: seen.append(vars(arguments)) or 0)
    for language in ("en", "zh"):
        page = (ROOT / "docs" / language / "ascend.md").read_text("utf-8")
        (torchrun,) = re.findall(r"^torchrun --nproc_per_node 8 -m mindspeed_fsdp2\.cli (.*)$", page, re.MULTILINE)
        for line in [*re.findall(r"^mindspeed-fsdp2 (.*)$", page, re.MULTILINE), torchrun]:
            assert main(line.split()) == 0
        assert f"`--timeout` {'seconds (60)' if language == 'en' else '秒（60）'}" in page
    assert [given["device_type"] for given in seen] == [None, "cpu", None] * 2
    assert {given["timeout"] for given in seen} == {60.0}


@pytest.mark.slow
def test_the_command_under_torchrun() -> None:
    run = ("-m", "torch.distributed.run", "--nproc_per_node", "4", "--master_port", "0", "--rdzv_backend", "c10d")
    done = command(*run, "-m", "mindspeed_fsdp2.cli", "doctor", "--device-type", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mindspeed-fsdp2 doctor\n") == 1
    assert lines_of(done.stdout)["training with replicas and shards (HSDP) equals DDP"][0] == "ok"
