"""Output of nccl-tests, statistics of Nsight Systems, memory snapshots of torch: read, bounded, refused."""

import gzip
import json
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command_line import accept, refuse
from workbench.cost.profile import load_profile
from workbench.trace_files.memory_snapshot import read_snapshot, snapshot_trace
from workbench.trace_files.nccl_tests import parse_nccl_tests, with_nccl_tests
from workbench.trace_files.nsys import parse_nsys, seconds_by_work

HERE = Path("all_reduce.txt")


def nccl_text(
    *,
    ranks: int = 8,
    hosts: int = 1,
    program: str = "all_reduce",
    factor: float | None = None,
    prefix: str = "",
    device: str = "NVIDIA H100 80GB HBM3",
) -> str:
    """As nccl-tests prints: 10 us and 100 GB/s on the bus, sizes from 1 MiB to 256 MiB."""
    factor = 2 * (ranks - 1) / ranks if factor is None else factor
    lines = [
        "# nccl-tests version 2.17.6 nccl-headers=22808 nccl-library=22808",
        f"# Collective test starting: {program}_perf",
        f"# nThread 1 nGpus {ranks} minBytes 1048576 maxBytes 268435456 step: 4(factor) warmup iters: 1",
        "# Using devices",
    ]
    for rank in range(ranks):
        host = f"node{rank * hosts // ranks}"
        where = f"on {host:>10} device {rank:2d} [0000:18:00] {device}"
        lines.append(f"#  Rank {rank:2d} Group  0 Pid {4000 + rank} {where}")
    lines += [
        "#                                                      out-of-place                in-place",
        "#       size    count   type  redop  root   time   algbw   busbw  #wrong  time algbw busbw  #wrong",
        "#        (B)  (elements)                    (us)  (GB/s)  (GB/s)           (us)  (GB/s)  (GB/s)",
    ]
    for power in range(20, 30, 2):
        size = 2**power
        time_us = 10 + size * factor / 100e9 * 1e6
        algorithm = size / time_us / 1e3
        cells = f"{time_us:.2f} {algorithm:.2f} {algorithm * factor:.2f} 0"
        lines.append(f"{size:12d} {size // 4:12d} float sum -1 {cells} {cells}")
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 93.1"]
    return "\n".join(prefix + line for line in lines) + "\n"


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("prefix", ["", "[1,0]<stdout>:"])
def test_an_all_reduce_becomes_rows(hosts, prefix):
    run = parse_nccl_tests(nccl_text(hosts=hosts, prefix=prefix), HERE)
    assert (run.program, run.num_ranks, run.link) == ("all_reduce", 8, "intra" if hosts == 1 else "inter")
    assert [row.num_bytes for row in run.rows] == [2**power for power in range(20, 30, 2)]
    for row in run.rows:
        assert row.seconds == pytest.approx(10e-6 + row.num_bytes * 1.75 / 100e9, abs=1e-8)


def test_a_profile_gets_the_measured_collective_and_link():
    """The rest of it stays; the link's speed and latency are those that the times were made of."""
    base = load_profile("H100")
    runs = [
        parse_nccl_tests(nccl_text(), HERE),
        parse_nccl_tests(nccl_text(ranks=2, program="sendrecv", factor=1.0), Path("sendrecv.txt")),
    ]
    made = with_nccl_tests(base, runs, "ours")
    [link] = [each for each in made.links if each.scope == "intra"]
    assert link.bytes_per_s == pytest.approx(100e9, rel=1e-3)
    assert link.latency_s == pytest.approx(10e-6, rel=1e-2)
    [table] = [t for t in made.collectives if (t.collective, t.scope) == ("all_reduce", "intra")]
    assert all(point[0] == 8 for point in table.table.points)
    assert made.matmul == base.matmul
    assert [each for each in made.links if each.scope != "intra"] == [
        each for each in base.links if each.scope != "intra"
    ]


def test_commands_on_links(tmp_path):
    text, out = tmp_path / "log.txt", tmp_path / "ours.json"
    text.write_text(nccl_text())
    accept("ingest", text, "--profile", "H100", "-o", out)
    assert load_profile(str(out)).name == "ours"
    rows = json.loads(accept("ingest", text, "--json").stdout)["rows"]
    assert len(rows) == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.replace("all_reduce_perf", "scatter_perf"), "of which program"),
        (lambda t: t.replace("all_reduce_perf", "all_gather_perf"), "is 1.75, that of all_gather on 8 ranks"),
        (lambda t: t.replace("on      node0", "at node0"), "want lines '# Rank"),
        (lambda t: t.replace("busbw", "speed"), "want the line '# size count"),
        (lambda t: t.split("#        (B)")[0], "want at least one line of a size"),
        (lambda t: t.replace("float sum -1 ", "float sum -1 x"), "want size, times and bandwidths"),
        (lambda t: t.replace("float sum -1 ", "float sum -1 nan "), "want finite times"),
    ],
)
def test_bad_output_of_nccl_tests_is_refused(tmp_path, change, words):
    path = tmp_path / "log.txt"
    path.write_text(change(nccl_text()))
    refuse("ingest", path, words=f"log.txt|{words}", folder=tmp_path)


def test_output_of_different_devices_is_refused(tmp_path):
    for name, device in (("a.txt", "NVIDIA H100"), ("b.txt", "NVIDIA A100")):
        (tmp_path / name).write_text(nccl_text(device=device))
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    arguments = ("ingest", *files, "--profile", "H100", "-o", tmp_path / "out.json")
    refuse(*arguments, words="a.txt|b.txt|of different devices", folder=tmp_path)
    refuse("ingest", files[0], "--profile", "H100", words="want both --profile NAME and -o", folder=tmp_path)


# Nsight Systems


NSYS = """Generating SQLite file report.sqlite from report.nsys-rep
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
50.0,5000000,10,500000.0,500000.0,1,1,0.0,"ampere_bf16_s16816gemm_bf16_128x128(int, int)"
30.0,3000000,4,750000.0,750000.0,1,1,0.0,"ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
15.0,1500000,2,750000.0,750000.0,1,1,0.0,"void flash_fwd_kernel<Traits, false>(Params)"
5.0,500000,2,250000.0,250000.0,1,1,0.0,"void at::native::vectorized_elementwise_kernel<4>(int)"
"""


def test_kernels_become_a_breakdown(tmp_path):
    rows = parse_nsys(NSYS, Path("kern.csv"))
    assert [row.count for row in rows] == [10, 4, 2, 2]
    want = {"products": 5e-3, "communication": 3e-3, "attention": 1.5e-3, "other": 0.5e-3}
    assert seconds_by_work(rows) == pytest.approx(want)
    path, out = tmp_path / "kern.csv", tmp_path / "rows.csv"
    path.write_text(NSYS)
    assert "communication" in accept("ingest", path, "-o", out).stdout
    assert out.read_text().splitlines()[1].startswith("products,10,0.005,")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (NSYS.splitlines()[1] + "\n", "want at least one kernel"),
        (NSYS.replace(",5000000,", ",many,"), "column 'Total Time (ns)': want a number >= 0, got 'many'"),
        (NSYS.replace("Instances", "Times"), "want columns"),
        (NSYS.replace(",10,", ",-10,"), "want a number >= 0, got '-10'"),
    ],
)
def test_bad_statistics_are_refused(tmp_path, text, words):
    path = tmp_path / "kern.csv"
    path.write_text(text)
    refuse("ingest", path, words=f"kern.csv|{words}", folder=tmp_path)


# Memory snapshots


def event(action: str, size: int, time_us: int) -> dict[str, object]:
    return {"action": action, "addr": 1, "size": size, "stream": 0, "time_us": time_us, "frames": []}


SNAPSHOT = {
    "segments": [{"device": 0, "active_size": 150, "blocks": []}],
    "device_traces": [
        [
            event("alloc", 100, 10_000_000),
            event("segment_alloc", 999, 10_000_001),
            event("alloc", 50, 10_500_000),
            event("free_requested", 100, 11_000_000),
            event("free_completed", 100, 11_000_000),
        ]
    ],
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("write", [pickle.dumps, lambda s: json.dumps(s).encode()])
def test_a_snapshot_becomes_a_curve(tmp_path, write, packed):
    """What was in use before recording began, 100 bytes, follows from what is in use at the end."""
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(gzip.compress(write(SNAPSHOT)) if packed and write is pickle.dumps else write(SNAPSHOT))
    trace = read_snapshot(path)
    assert [(s.rank, s.time_s, s.num_bytes) for s in trace.memory] == [
        (0, 0, 200),
        (0, 0.5, 250),
        (0, 1, 150),
    ]


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=50), st.randoms(use_true_random=False))
def test_curves_follow_an_allocator(sizes, random):
    """Any order of allocations and frees, some of what was there before: the bytes in use at every event."""
    held: list[int] = [random.randint(1, 10**6) for _ in range(3)]
    events, want = [], []
    for number, size in enumerate(sizes):
        if held and random.random() < 0.5:
            events.append(event("free_completed", held.pop(random.randrange(len(held))), number))
        else:
            held.append(size)
            events.append(event("alloc", size, number))
        want.append(sum(held))
    segments = [{"device": 0, "active_size": sum(held)}]
    trace = snapshot_trace({"segments": segments, "device_traces": [events]}, Path("s"))
    assert [sample.num_bytes for sample in trace.memory] == want


class Harmful:
    """What a pickle of a user may do when Python loads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_no_pickle_runs_anything(tmp_path):
    path = tmp_path / "snapshot.pickle"
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps({"device_traces": [Harmful(tmp_path / "made")]}, protocol))
        refuse("ingest", path, words="snapshot.pickle|plain data is wanted|mkdir", folder=tmp_path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(pickle.dumps(SNAPSHOT)[:-9], "plain data is wanted", id="cut"),
        pytest.param(pickle.dumps([1]), "no memory snapshot", id="list"),
        pytest.param(pickle.dumps({"device_traces": [[]]}), "_record_memory_history", id="empty"),
        pytest.param(pickle.dumps({"device_traces": [3]}), "want a list of events", id="number"),
        pytest.param(pickle.dumps({"device_traces": [[3]]}), "want events that are dicts", id="event"),
        pytest.param(
            pickle.dumps({"device_traces": [[event("alloc", -5, 0)]]}), "want whole size", id="negative"
        ),
        pytest.param(b'{"segments": [], "device_traces": ', "not JSON, or cut off", id="json"),
        pytest.param(b"\x80\x04\x8c\xff\xff", "plain data is wanted", id="damaged"),
    ],
)
def test_bad_snapshots_are_refused(tmp_path, content, words):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)
    refuse("ingest", path, "-o", tmp_path / "out.json", words=f"snapshot.pickle|{words}", folder=tmp_path)


def test_files_of_different_kinds_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text(NSYS)
    (tmp_path / "b.txt").write_text(nccl_text())
    words = "a.csv|b.txt|want files of one kind"
    refuse("ingest", tmp_path / "a.csv", tmp_path / "b.txt", words=words, folder=tmp_path)
