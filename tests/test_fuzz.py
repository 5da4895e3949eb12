"""The fuzzer: every reader and message has a target, good inputs are taken, past findings stay mended."""

import ast
import ctypes
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from experiments.doors.whole_configs import CONFIGS
from experiments.fuzz import trees
from experiments.fuzz.__main__ import beside, previous_run
from experiments.fuzz.run import Fuzzing, fuzzed
from experiments.fuzz.target import Ending, Ready, Target, TargetKind, UnclearError, judged, naming
from experiments.fuzz.targets.registry import TARGETS
from experiments.fuzz.worker import prepared
from runtime.preprocess.answers import ANSWERS
from runtime.preprocess.messages import KINDS_OF
from tests.examples import is_quick
from workbench.model.composites.registry import COMPOSITES
from workbench.model.families.registry import ARCHITECTURES

ROOT = Path(__file__).parents[1]
FINDINGS = Path(__file__).parent / "fuzz_findings"
READS = re.compile(
    r"\b(read_bounded|read_small|open_regular|parse_strict|parse_yaml|parse_json|json\.loads|safe_open|pa\.OSFile"
    r"|pq\.ParquetFile|Image\.open|wave\.open|csv\.(reader|DictReader)|pickle\.loads|recv_multipart|recv_bytes"
    r"|read_text|read_bytes)\("
    r"|\.open\(\"rb\"\)"
)
OWN = "written by the process itself, or by the one that started it"
SHIPPED = "ships with the program"
SYSTEM = "the operating system's"
CHECKED = "of a configuration or a plan that was checked before"
WRITES = "writes"
COMPARES = "bytes are compared, not parsed"
BELOW = "what readers call"
TRUSTED = "torch's earlier format, read by the one command that asks for trust"
UNFUZZED = {
    "runtime.data.scenes:_write_wave": WRITES,
    "runtime.elastic.member:_listen": OWN,
    "runtime.elastic.nodes:_receive": OWN,
    "runtime.elastic.prepared:read_prepared": OWN,
    "runtime.elastic.forecast:rehearse": OWN,
    "runtime.elastic.world:read_lowered": OWN,
    "runtime.frontend.multimodal:graph": CHECKED,
    "runtime.measure.microbench:_processor_name": SYSTEM,
    "runtime.measure.sustained:_cpu_cache_bytes": SYSTEM,
    "runtime.models.adapter_files:finish_adapters": OWN,
    "runtime.models.configuration:_checked": OWN,
    "runtime.next_plan:main": OWN,
    "runtime.next_plan:planned": OWN,
    "runtime.preprocess.producer:main": OWN,
    "runtime.state.import_old:_check_sums": TRUSTED,
    "runtime.state.import_old:_import_step": TRUSTED,
    "runtime.state.weights_export:_as_origin_has": OWN,
    "runtime.state.weights_export:_dtype_of": OWN,
    "runtime.state.weights_export:_write_composite": OWN,
    "runtime.state.weights_export:_finish_module": CHECKED,
    "runtime.state.weights_export:_holds_all": OWN,
    "runtime.state.weights_export:_placed": OWN,
    "runtime.state.weights_export:_tensor_bytes": OWN,
    "runtime.world.busy_cores:_all_s": SYSTEM,
    "runtime.world.busy_cores:process_seconds": SYSTEM,
    "runtime.world.owner:_text": SYSTEM,
    "runtime.world.pool:_answer": OWN,
    "runtime.world.pool:_receive": OWN,
    "runtime.world.pool:_serve": OWN,
    "workbench.supervised:_command_of": SYSTEM,
    "workbench.bounded_file:open_regular": BELOW,
    "workbench.bounded_file:read_bounded": BELOW,
    "workbench.frozen_json:parse_json": BELOW,
    "workbench.job.draft:_text": OWN,
    "workbench.llm_table.frameworks:frameworks": SHIPPED,
    "workbench.model.config_aliases:aliases": SHIPPED,
    "workbench.model.config_keys:known_keys": SHIPPED,
    "workbench.model.item_tokens:source_config": CHECKED,
    "workbench.model.shape:shapes": SHIPPED,
    "workbench.strict_json:parse_strict": BELOW,
    "runtime.fsdp2_train:main": OWN,
    "workbench.cli.starting:_warn_of_edits": COMPARES,
    "workbench.stopped:is_stopped": SYSTEM,
    "workbench.export.decoder:config_of": CHECKED,
    "workbench.export.fsdp2:program_text": SHIPPED,
    "workbench.report.assemble:_text": SHIPPED,
    "workbench.search.kept_results:code_hash": SHIPPED,
    "workbench.search.joint.workers:_run_pickled": OWN,
    "workbench.search.joint.workers:_initialize": OWN,
}
"""Functions that read, and why nothing that somebody else may write reaches them."""


def readers() -> Iterator[str]:
    """`module:function` of all functions that read or parse."""
    for package in ("workbench", "sim", "runtime"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if not READS.search(text):
                continue
            lines = text.splitlines()
            module = str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef) and READS.search(
                    "\n".join(lines[node.lineno - 1 : node.end_lineno])
                ):
                    yield f"{module}:{node.name}"


def test_every_reader_has_a_target():
    fuzzed_ones = {reader for target in TARGETS.values() for reader in target.readers}
    found = set(readers())
    assert sorted(found - fuzzed_ones - UNFUZZED.keys()) == []
    assert sorted(UNFUZZED.keys() - found) == []


def test_every_kind_of_message_family_and_composite_has_a_target():
    messages = {name for name, target in TARGETS.items() if target.kind is TargetKind.MESSAGE}
    served = {f"served-{role}-{kind}" for role, kinds in KINDS_OF.items() for kind in kinds}
    assert messages == served | {f"heard-{kind}" for kind in ANSWERS}
    assert {f"config-{name}" for name in ARCHITECTURES} <= TARGETS.keys()
    assert {config["model_type"] for config in CONFIGS.values()} == set(COMPOSITES)


QUICK = (
    "job",
    "plan-v1",
    "trace-v2",
    "sizes-arrow",
    "weights",
    "checkpoint-metadata",
    "keys-server",
)
SHORT = (*QUICK, "heard-batch", "served-producer-done")


@pytest.mark.parametrize("name", QUICK)
def test_good_inputs_are_taken(tmp_path, name):
    ready = prepared(TARGETS[name], tmp_path)
    for index in range(len(ready.seeds)):
        result = judged(ready, ready.good(index))
        assert (result.ending, result.passed_parse) == (Ending.ACCEPTED, True), result.text


def test_a_short_run_finds_nothing():
    chosen = {name: TARGETS[name] for name in SHORT}
    count = (8 if is_quick() else 25) * len(SHORT)
    tally = fuzzed(chosen, Fuzzing(count=count, seed=1))
    record = tally.record(chosen)
    assert record["inputs"] == count
    assert record["findings"] == []


@pytest.mark.parametrize(
    "path", sorted(FINDINGS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_what_was_found_stays_mended(tmp_path, path):
    ready = prepared(TARGETS[path.parent.name], tmp_path)
    result = judged(ready, path.read_bytes())
    assert result.ending in (Ending.ACCEPTED, Ending.REFUSED), result.text


WAITS_S = {"hang": 60.0, "slow": 0.4}


def broken(kind: str) -> Target:
    """A reader that goes wrong in one way where the input is not the good one."""

    def make(folder: Path) -> Ready:
        out = folder / "out"
        out.mkdir()

        def take(content: bytes) -> None:
            if content == b"[1]":
                return
            match kind:
                case "traceback":
                    raise KeyError("x")
                case "unclear line":
                    with naming("file.json"):
                        raise ValueError("no")
                case "half written":
                    (out / "a").write_text("x")
                    raise ValueError("refused")
                case "native crash":
                    ctypes.string_at(0)
                case "over 2 GB":
                    bytearray(5 * 2**30)
                case _:
                    time.sleep(WAITS_S[kind])

        return Ready(seeds=[[1]], render=trees_bytes, parse=lambda content: content, take=take, out=out)

    return Target(name=kind, make=make)


def trees_bytes(tree: object) -> bytes:
    return repr(tree).encode("utf-8", "backslashreplace")


@pytest.mark.parametrize(
    "kind", ["traceback", "unclear line", "half written", "native crash", "over 2 GB", "hang"]
)
def test_every_kind_of_finding_is_found(monkeypatch, kind):
    if kind == "hang":
        monkeypatch.setattr("experiments.fuzz.worker.HANG_S", 0.3)
    count = 3 if kind == "hang" else 8
    tally = fuzzed({kind: broken(kind)}, Fuzzing(count=count, seed=0, num_workers=1))
    assert tally.num_inputs == count, tally.findings
    assert tally.count(Ending(kind)) >= count // 2
    found = sum(tally.count(ending) for ending in (Ending.ACCEPTED, Ending(kind)))
    assert found == count, tally.findings


def test_what_a_busy_machine_makes_slow_is_no_hang(monkeypatch):
    """However long it sleeps: the seconds of its second chance are the cores'."""
    monkeypatch.setattr("experiments.fuzz.worker.HANG_S", 0.3)
    monkeypatch.setattr("experiments.fuzz.worker.PATIENCE", 200)
    tally = fuzzed({"slow": broken("slow")}, Fuzzing(count=2, seed=0, num_workers=1))
    assert tally.count(Ending.ACCEPTED) == tally.num_inputs == 2


def test_a_record_stays_beside_that_of_other_targets(tmp_path):
    out = tmp_path / "fuzz.json"
    old = {"seed": 0, "commit": "a", "seconds": 1.0, "findings": [{"target": "x"}, {"target": "y"}]}
    out.write_text(json.dumps(old | {"targets": {"x": {"inputs": 5, "hangs": 1}, "y": {"inputs": 3}}}))
    new = {"seed": 0, "commit": "b", "seconds": 2.0, "findings": [], "targets": {"x": {"inputs": 7}}}
    record = beside(new, previous_run(out, 0))
    assert (record["inputs"], record["hangs"], record["seconds"]) == (10, 0, 3.0)
    assert record["findings"] == [{"target": "y"}]
    assert record["targets"]["x"]["commit"] == "b"
    with pytest.raises(ValueError, match="its seed is 0, got --seed 1; nearest: 0, or another --out"):
        previous_run(out, 1)
    out.write_text("[]")
    with pytest.raises(ValueError, match=r"want a record of `python -m experiments\.fuzz`"):
        previous_run(out, 0)


def test_inputs_follow_from_seed_target_and_number(tmp_path):
    ready = prepared(TARGETS["keys-client"], tmp_path)
    first, again, other = (ready.mutant(Random(f"0:a:{number}")) for number in (5, 5, 6))
    assert first == again != other


def test_mutations_leave_the_seed_as_it_is():
    seed = {"a": [1, 2, {"b": "text"}], "c": None}
    kept = repr(seed)
    found = {repr(trees.mutated(seed, Random(number))) for number in range(200)}
    assert repr(seed) == kept
    assert len(found) > 100


def test_a_line_that_does_not_name_the_file_is_unclear():
    with pytest.raises(UnclearError, match=r"does not name 'a\.json'"), naming("a.json"):
        raise ValueError("want a number")
    with pytest.raises(ValueError, match=r"a\.json: want"), naming("a.json"):
        raise ValueError("a.json: want a number")


def test_the_command_prints_seed_and_counts():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.fuzz", "--only", "keys-client", "--count", "20", "--json"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert "seed 0, 1 targets" in done.stderr
    assert '"tracebacks": 0' in done.stdout.splitlines()[-1]
