"""What commands print beside their words: tables as data, whole figures in pipes, progress, completion."""

import ast
import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import typer
from rich.table import Table
from rich.text import Text

from tests.command_line import workbench
from workbench.cli import console
from workbench.cli.app import COMMANDS
from workbench.cli.extras import missing_text
from workbench.report import progress
from workbench.report.progress import ticking
from workbench.report.table_rows import Format, rows_of, written
from workbench.report.tables import demo_table, mebibytes, milliseconds, percent, span_text, titled

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TINY = EXAMPLES / "tiny.yaml"
CPU = EXAMPLES / "elastic-cpu.json"


def figures() -> Table:
    table = titled("figures", ("", "ranks", "took", "80 % within", "$/h", "share"))
    table.add_row(Text("encoders"))
    table.add_row("  vision", "4", milliseconds(0.0123456), span_text(0.01, 0.02), "1,024", "-")
    table.add_row(Text("rest"))
    table.add_row("llm", "0-2, 5", milliseconds(7.5), "-", "0.5", percent(1 / 3, signed=False))
    return table


ROWS = [
    {
        "group": "encoders",
        "name": "vision",
        "ranks": "4",
        "took_s": 0.0123456,
        "80_percent_within_low_s": 0.01,
        "80_percent_within_high_s": 0.02,
        "dollars_per_h": 1024,
        "share": None,
    },
    {
        "group": "rest",
        "name": "llm",
        "ranks": "0-2, 5",
        "took_s": 7.5,
        "80_percent_within_low_s": None,
        "80_percent_within_high_s": None,
        "dollars_per_h": 0.5,
        "share": 1 / 3,
    },
]


def test_rows_have_whole_figures_in_si_units() -> None:
    assert rows_of([figures()]) == [ROWS[0] | {"ranks": 4}, ROWS[1]]


def test_a_file_has_one_type_a_column() -> None:
    assert json.loads(written([figures()], Format.JSON)) == rows_of([figures()])
    assert pq.read_table(io.BytesIO(written([figures()], Format.PARQUET))).to_pylist() == ROWS


def test_several_tables_are_told_apart() -> None:
    other = titled("more", ("", "memory"))
    other.add_row("rank 0", mebibytes(2**20))
    text = written([figures(), other], Format.CSV).decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["table"] for row in rows] == [row["title"] for row in rows] == ["figures", "figures", "more"]
    assert (rows[2]["memory_bytes"], rows[2]["took_s"]) == (str(2**20), "")


def test_the_key_of_a_table_stays_when_its_title_varies() -> None:
    tables = [titled(f"idle time, {took}", ("",), key="idle time") for took in ("3 ms", "4 ms")]
    for table in tables:
        table.add_row("rank 0")
    named = [(row["table"], row["title"]) for row in rows_of(tables)]
    assert named == [("idle time", "idle time, 3 ms"), ("idle time", "idle time, 4 ms")]


def test_every_title_that_varies_has_a_key() -> None:
    """A call with a text that is not constant; `_changes_table` and its like hand constants on."""
    handed_on = {"_text_table", "_changes_table", "_seconds_table", "listed"}
    sites = 0
    for path in (ROOT / "workbench").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                if not isinstance(call.func, ast.Name) or call.func.id not in ("titled", "listed"):
                    continue
                sites += 1
                has_key = any(
                    isinstance(word.value, ast.Constant) for word in call.keywords if word.arg == "key"
                )
                is_constant = isinstance(call.args[0], ast.Constant)
                assert has_key or is_constant or function.name in handed_on, f"{path}:{call.lineno}"
    assert sites > 20


@pytest.mark.parametrize("columns", [60, 5000])
def test_no_figure_is_cut(columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """In a pipe and on a narrow terminal; prose is wrapped, and lost neither."""
    monkeypatch.setenv("COLUMNS", str(columns))
    headers = [f"figure {index}" for index in range(40)]
    table = titled("wide", (*headers, "why"))
    table.columns[-1].no_wrap = False
    table.add_row(*(f"{index:.12f}" for index in range(40)), "because of this and that " * 10)
    console.show(table)
    text = capsys.readouterr().out
    assert "…" not in text
    assert re.findall(r"\d+\.\d{12}", text) == [f"{index:.12f}" for index in range(40)]
    assert text.count("because") == 10


@pytest.mark.parametrize(("columns", "is_fitted"), [(40, True), (400, False)])
def test_what_all_rows_have_in_common_stands_below_on_a_narrow_terminal(
    columns: int, is_fitted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    table = titled("plans", ("strategy", "tp", "cp", "microbatches\nof each", "iteration"))
    table.caption = "said before"
    for name, cp, took_s in (("cornstarch", "1", 0.072), ("entrain", "2", 0.073)):
        table.add_row(name, "1", cp, "8", milliseconds(took_s))
    console.show(table)
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    lines = [line.split() for line in text.splitlines()]
    assert ("same in all rows: tp 1, microbatches of each 8" in " ".join(text.split())) is is_fitted
    rows = [["cornstarch", "1", "72", "ms"], ["entrain", "2", "73", "ms"]]
    whole = [[name, "1", cp, "8", *took] for name, cp, *took in rows]
    assert [line for line in lines if line[:1] in (["cornstarch"], ["entrain"])] == (
        rows if is_fitted else whole
    )
    assert len(table.columns) == 5
    assert "said before" in text


def test_names_between_colons_stand_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    table = titled("modules", ("module",))
    table.add_row(":eye:")
    console.show(table, "written to :eye:.json")
    assert capsys.readouterr().out.count(":eye:") == 2


def test_tables_alone_go_to_stdout_in_a_format(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    done = workbench("plan", TINY, "--profile", CPU, "-o", plan, "--format", "csv")
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["module"] for row in rows] == ["vision", "audio", "llm", "llm"]
    assert rows[0]["weights"] == "859264"
    assert f"written to {plan}" in done.stderr
    checked = json.loads(workbench("check", plan, "--format", "json").stdout)
    assert {row["table"] for row in checked} == {"stages", "peak memory", "programs"}
    assert workbench("check", plan).stdout.startswith("accepted: sound, fits, free of deadlock")


def test_reasons_below_a_table_are_whole_lines_beside_its_data(capsys: pytest.CaptureFixture[str]) -> None:
    """A search has one for each strategy without a plan, some 400 characters long where memory is short."""
    table = titled("plans", ("strategy",))
    table.add_row("dip")
    reasons = [f"{name}: {'rank 0 does not fit; ' * 20}nearest: {name}" for name in ("fsdp", "entrain")]
    table.caption = "\n".join(reasons)
    with console.in_format(Format.CSV):
        console.show(table, "fits: 1 of 3")
    assert capsys.readouterr().err.splitlines() == ["fits: 1 of 3", *reasons]


def test_a_job_without_a_plan_is_told_the_whole_reason(tmp_path: Path) -> None:
    """Rank, moment, holders, and the memory it wants: nothing is left out of the middle."""
    job = tmp_path / "job.yaml"
    long_name = "a-job-with-a-long-name-" + 9 * "of-ours-"
    text = TINY.read_text(encoding="utf-8").replace("name: tiny", f"name: {long_name}")
    job.write_text(re.sub(r"memory_gib: .*", "memory_gib: 0.001", text), encoding="utf-8")
    done = workbench("search", job, "--profile", CPU, "--no-cache", "--strategy", "cornstarch")
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) > 300
    assert " ... " not in done.stderr
    for words in (long_name, "does not fit", "want memory_gib >= "):
        assert words in done.stderr


def test_json_and_a_format_exclude_each_other(tmp_path: Path) -> None:
    done = workbench("plan", TINY, "-o", tmp_path / "p.json", "--json", "--format", "csv")
    assert (done.exit_code, done.stderr) == (
        2,
        "workbench: error: --json and --format csv exclude each other\n",
    )


def test_every_command_that_prints_tables_takes_a_format() -> None:
    without = {"layout", "report", "reproduce", "schema", "trace"}
    for name in set(COMMANDS) - {"profile", "checkpoint", "preprocess"}:
        flags = {flag for parameter in COMMANDS[name].load(name).params for flag in parameter.opts}
        assert ("--format" in flags) == (name not in without), name
    for group, name in (("profile", "show"), ("profile", "new"), ("preprocess", "run")):
        command = COMMANDS[group].load(group).commands[name]
        assert "--format" in {flag for parameter in command.params for flag in parameter.opts}


def test_a_pipe_gets_plain_lines_of_what_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = iter([0.0, 1.0, 11.0, 15.0, 25.0])
    monkeypatch.setattr(progress, "monotonic", lambda: next(now_s))
    with ticking("searching", None, quiet=False) as ticker:
        ticker.at(1, 19, "soon")
        ticker.at(2, 19, "best so far dip, 1.5 s")
        ticker.step()
        ticker.step("on")
    assert capsys.readouterr().err == (
        "searching: 2 of 19 after 11 s, best so far dip, 1.5 s\nsearching: 4 of 19 after 25 s, on\n"
    )


def test_quiet_work_says_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with ticking("searching", 3, quiet=True) as ticker:
        ticker.step("x")
    assert capsys.readouterr().err == ""


def test_version_is_the_installed_one() -> None:
    assert re.fullmatch(r"multimodal-workbench \d+\.\d+\.\d+\n", workbench("--version").stdout)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("workbench sea", "search"),
        ("workbench search --obj", "--objective"),
        ("workbench plan --strategy hs", "hsdp"),
    ],
)
def test_a_shell_completes_commands_flags_and_choices(typed: str, completed: str) -> None:
    asked = {
        "_WORKBENCH_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(typed.count(" ")),
    }
    script = "from workbench.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | asked, check=False
    )
    assert done.stdout.split() == [completed], done.stderr


def test_a_missing_package_is_named_with_the_extra_that_brings_it() -> None:
    lacking = ModuleNotFoundError("No module named 'PIL.Image'", name="PIL.Image")
    assert missing_text("run", lacking) == "run needs pillow: pip install 'multimodal-workbench[run]'"
    assert missing_text("run", ModuleNotFoundError("no", name="numpy")) is None


def test_the_demo_says_which_plans_are_the_same_on_this_machine() -> None:
    """Of one mix, as many ranks and the same time to the last bit; others are not named."""
    row = {
        "num_ranks": 4,
        "predicted_again_s": None,
        "executed_s": 1.0,
        "error": 0.0,
        "drift": None,
        "error_corrected": None,
        "spread": 0.0,
    }
    plans = [
        row | {"plan": "a-mixed", "mix": "mixed", "predicted_s": 1.5},
        row | {"plan": "b-mixed", "mix": "mixed", "predicted_s": 1.5},
        row | {"plan": "c-mixed", "mix": "mixed", "predicted_s": 1.6},
        row | {"plan": "a-equal", "mix": "equal", "predicted_s": 1.5},
    ]
    totals = {"median_abs_error": 0.0, "worst_abs_error": 0.0, "spread": 0.0, "error": 0.0, "recalibrated": 0}
    unread = {"drift": None, "error_corrected": None, "median_abs_error_corrected": None}
    record = totals | unread | {"plans": plans, "machine": "this"}
    assert str(demo_table(record).caption).splitlines()[2:] == ["the same plan here: a-mixed, b-mixed"]


def test_the_demo_shows_what_later_runs_were_compared_with() -> None:
    """A machine that became half as fast and was calibrated again: the first prediction explains no error."""
    row = {
        "plan": "a",
        "mix": "mixed",
        "num_ranks": 4,
        "predicted_s": 1.0,
        "predicted_again_s": 2.0,
        "executed_s": 2.0,
        "error": 0.0,
        "drift": None,
        "error_corrected": None,
        "spread": 0.0,
    }
    totals = {"median_abs_error": 0.0, "worst_abs_error": 0.0, "spread": 0.0, "error": 0.0, "recalibrated": 1}
    unread = {"drift": None, "error_corrected": None, "median_abs_error_corrected": None}
    record = totals | unread | {"plans": [row, row | {"predicted_again_s": None}], "machine": "this"}
    table = demo_table(record)
    assert [each["predicted_again_s"] for each in rows_of([table])] == [2.0, None]
    assert "each run's error is against the prediction of its own calibration" in str(table.caption)


def test_ctrl_c_is_one_line_and_the_code_that_shells_expect(capsys: pytest.CaptureFixture[str]):
    program = typer.Typer(cls=console.OneLineErrors)

    @program.command("wait")
    def waiting() -> None:
        raise KeyboardInterrupt

    program.command("other")(lambda: None)
    with pytest.raises(SystemExit) as ended:
        program(["wait"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "workbench: interrupted\n"


def test_memory_is_printed_in_gib_and_rates_in_gb_a_second(tmp_path: Path) -> None:
    """65.01 GB beside a plan's 60.5 GiB looks like a plan that does not fit."""
    rows = tmp_path / "rows.csv"
    rows.write_text("hidden,layers,heads,sequence,global_batch,gpu\n1024,8,16,1024,8,H100\n")
    shown = workbench("predict", rows, "-o", tmp_path / "out.csv").stdout
    shown += workbench("profile", "show", "H200").stdout
    assert re.search(r"memory +131\.3 GiB", shown)
    assert len(re.findall(r"\d [KMG]iB", shown)) == 2
    assert not re.findall(r"\d GB(?!/s)", shown)
