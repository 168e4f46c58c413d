"""`ranvier replay` as it is typed: what it prints, what it writes, and one line for everything that is wrong."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
from io import StringIO
from pathlib import Path

import pytest

from ranvier_py.cli import main
from ranvier_py.replay import replay_command as command
from ranvier_py.replay.replay_command import Progress, replace_file
from ranvier_py.replay.replay_flags import add_flags
from ranvier_py.replay.replay_request import policies_of, size_of

BAD_SWEEPS = ("", "rate=", "rate=0", "rate=-1,2", "rate=inf", "rate=nan", "speed=1", "1,2", "rate=1,x")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sixty requests of five documents, in Mooncake's format."""
    path = tmp_path / "small.jsonl"
    lines = [
        {
            "timestamp": 400 * number,
            "input_length": 512 * 4 + 100,
            "output_length": 20,
            "hash_ids": [number % 5, 100 + number % 5, 200 + number % 5, 300 + number % 10, 1000 + number],
        }
        for number in range(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def replay(*words: object) -> int:
    return main(["replay", *map(str, words)])


def test_the_table_goes_to_stdout_and_progress_to_stderr(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(trace, "--policy", "affinity,round_robin", "--engines", 2, "--jobs", 1) == 0
    out = capsys.readouterr()
    lines = out.out.splitlines()
    assert lines[0].startswith("small: 60 requests in")
    assert [line.split()[0] for line in lines[1:4]] == ["policy", "affinity", "round_robin"]
    assert "2 of 2 runs" in out.err
    assert "\x1b" not in out.out + out.err


def test_results_are_left_as_json_with_the_curves_of_a_sweep(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    words = ("--policy", "affinity", "--nodes", "1,2", "--sweep", "rate=2,1", "--cache-tokens", "1M", "--out", out)
    assert replay(trace, *words, "--gossip-delay", "0.1", "--jobs", 2, "--limit", 40, "--restart", "1@5") == 0
    found = json.loads((out / "results.json").read_text())
    assert [(run["rate"], run["nodes"]) for run in found["runs"]] == [(1.0, 1), (1.0, 2), (2.0, 1), (2.0, 2)]
    assert {run["requests"] for run in found["runs"]} == {40}
    assert [(kind["count"], kind["cache_tokens"]) for kind in found["settings"]["engines"]] == [(8, 1_000_000)]
    assert found["settings"]["restarts"] == [[5.0, 1]]
    assert found["traces"][0]["block_tokens"] == 512
    assert [len(curve["points"]) for curve in found["curves"]] == [2, 2]
    assert len(found["runs"][0]["ttft_quantiles"]) == 101


def test_requests_are_reported_one_by_one_in_the_order_of_the_runs(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    assert replay(trace, "--policy", "random,ttft", "--per-request", path, "--jobs", 2, "--engines", 3) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["policy"] for line in lines] == ["random"] * 60 + ["ttft"] * 60
    assert lines[0]["terms"] == []
    assert len(lines[60]["terms"]) == 3  # one for each engine
    assert all({"queue_s", "prefill_s", "sum_s", "tokens_per_s"} <= each.keys() for each in lines[60]["terms"])
    assert all(line["regret_s"] >= 0 for line in lines)
    late = lines[119]
    assert late["terms"][late["engine"]]["prefill_s"] < max(each["prefill_s"] for each in late["terms"])


def test_engines_of_several_kinds_take_turns(trace: Path, tmp_path: Path) -> None:
    words = ("--policy", "random", "--preset", "h100-llama-8b,l4-llama-8b", "--engines", "3", "--out", tmp_path)
    assert replay(trace, *words, "--jobs", 1) == 0
    engines = json.loads((tmp_path / "results.json").read_text())["settings"]["engines"]
    assert [kind["count"] for kind in engines] == [2, 1]
    assert engines[0]["prefill_tokens_per_s"] > 4 * engines[1]["prefill_tokens_per_s"]


def test_each_kind_of_cache_has_its_runs_and_hybrid_ones_reuse_less(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = "attention,marconi,sglang_plus,vllm_plus,vanilla"
    words = ("--policy", "affinity", "--engines", 2, "--jobs", 1, "--hybrid-model", "qwen3.5-9b", "--out", tmp_path)
    assert replay(trace, "--cache", kinds, *words) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    rates = [run["hit_rate"] for run in found["runs"]]
    assert rates[0] > rates[1] >= rates[2] > rates[4] == 0.0
    assert rates[0] >= rates[3] > 0.0
    assert [summary["name"] for summary in found["traces"]] == [f"small, cache {kind}" for kind in kinds.split(",")]
    assert (found["settings"]["caches"], found["settings"]["engines"][0]["hybrid_model"]) == (
        kinds.split(","),
        "qwen3.5-9b",
    )
    assert "small, cache marconi: 60 requests" in capsys.readouterr().out


def test_engines_with_caches_of_several_kinds_stand_before_one_router(trace: Path, tmp_path: Path) -> None:
    words = ("--cache-tokens", "1M", "--engines", 2, "--policy", "random", "--jobs", 1, "--out", tmp_path)
    rates = []
    for kinds in ("attention", "attention,sglang-no-buffer", "sglang-no-buffer"):
        assert replay(trace, "--preset", kinds, *words) == 0
        found = json.loads((tmp_path / "results.json").read_text())
        assert [each["cache"].replace("_", "-") for each in found["settings"]["engines"]] == kinds.split(",")
        rates.append(found["runs"][0]["hit_rate"])
    assert rates[0] > rates[1] > rates[2] > 0.0


def test_a_bar_is_drawn_over_and_over_where_a_person_looks() -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = Progress(stream, requests=1000, runs=2)
    progress.show(500, 0)
    progress.show(501, 0)  # too soon to be drawn
    progress.end()
    assert stream.getvalue().count("\r") == 2
    assert "###............... " in stream.getvalue()
    assert " 50%  0 of 2 runs, " in stream.getvalue()


def test_oracles_are_run_once_whatever_the_number_of_nodes(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policy", "oracle_ttft,random", "--nodes", "1,2", "--gossip-delay", "1", "--engines", "2", "--jobs", "1")
    assert replay(trace, *words) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.partition("\n\n")[0].splitlines()[2:]]
    assert rows == [["random", "1"], ["random", "2"], ["oracle_ttft", "-"]]


def test_all_stands_for_all_policies_within_a_list_too() -> None:
    assert policies_of("ttft,all") == tuple(dict.fromkeys(["ttft", *policies_of("all")]))
    assert "all" not in policies_of("all , ttft")


def test_a_run_that_fails_is_reported_alike_with_one_job_and_with_several(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("ranvier_py.replay.jobs.make_run", broken)
    for jobs in (1, 2):
        assert replay(trace, "--policy", "affinity,round_robin", "--jobs", jobs) == 1
        err = capsys.readouterr().err
        assert "ranvier: the run of affinity on 1 nodes at rate 1 died: Traceback" in err
        assert "ZeroDivisionError" in err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--policy", "best"], "--policy: there is no 'best', there are affinity"),
        (["--cache-tokens", "many"], "--cache-tokens: expected a whole number from 1"),
        (["--cache-tokens", "1.5"], "--cache-tokens: expected a whole number from 1"),
        (["--cache-tokens", "100"], "--cache-tokens: expected at least the 512 tokens of a block"),
        (["--preset", "abacus"], "--preset: no engine preset 'abacus': there are lab"),
        (["--cache", "none"], "--cache: there is no 'none', there are attention, vanilla"),
        (["--hybrid-model", "m"], "--hybrid-model: there is no 'm', there are paper-7b"),
        (["--routes", "0"], "--routes: expected a whole number from 1 to"),
        (["--eviction", "oldest"], "--eviction: there is no 'oldest', there are lru, utility"),
        (["--engines", "0"], "--engines: expected a whole number from 1 to"),
        (["--nodes", "1,,4"], "--nodes: expected a whole number from 1 to"),
        (["--speed", "-1"], "--speed: expected a number above 0"),
        (["--speed", "nan"], "--speed: expected a number above 0"),
        *((["--sweep", text], "--sweep: a sweep is rate=") for text in BAD_SWEEPS),
        (["--sweep", "rate=1", "--speed", "2"], "--sweep: names its speeds itself"),
        (["--policy-option", "load"], "--policy-option: expected NAME=VALUE"),
        (["--policy-option", "nothing=1"], "--policy-option: nothing: no policy has this option"),
        (["--restart", "9"], "--restart: expected ENGINE@SECONDS"),
        (["--restart", "8@1"], "--restart: expected a whole number from 0 to 7"),
        (["--format", "xml"], "--format: there is no 'xml', there are mooncake"),
        (["--arrivals", "nowhere.csv"], "--arrivals: there is no file nowhere.csv"),
        (["--cache-tokens", "3"], "--cache-tokens: expected at least the 512 tokens of a block"),
        (["--arrivals-replace"], "--arrivals-replace: needs the file of --arrivals"),
        (["--speed", "1e-300"], "TRACE: the requests come within"),
    ],
)
def test_what_is_wrong_is_stated_in_one_line(
    trace: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(trace, *words) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.replace(str(trace), "TRACE").startswith(f"ranvier: {line}")
    assert out.err.count("\n") == 1


def test_a_file_that_is_not_there_or_no_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(tmp_path / "missing.jsonl") == 2
    assert capsys.readouterr().err == f"ranvier: TRACE: there is no file {tmp_path / 'missing.jsonl'}\n"
    other = tmp_path / "other.jsonl"
    other.write_text('{"hash_ids": 5}\n')
    assert replay(other) == 2
    assert capsys.readouterr().err.startswith(f"ranvier: {other}:1: ")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("200k", 200_000),
        ("1M", 1_000_000),
        ("1.5M", 1_500_000),
        ("1_000", 1000),
        ("2 K", 2000),
        ("4.1M", 4_100_000),
        ("1e3", None),
        ("9" * 400, None),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, value: int | None) -> None:
    assert size_of(text) == value


# --- what a person does who has not read anything -------------------------------------------------------------------


def test_time_stamps_of_two_clocks_are_reported_from_a_long_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "far.jsonl"
    line = {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]}
    path.write_text(f"{json.dumps(line)}\n{json.dumps({**line, 'timestamp': 10**15})}\n")
    assert replay(path, "--jobs", 1) == 2
    assert "are the time stamps of one clock" in capsys.readouterr().err


def test_a_place_that_can_not_be_written_is_refused_before_the_work(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    assert replay(trace, "--per-request", tmp_path) == 2
    assert replay(trace, "--per-request", "") == 2
    assert replay(trace, "--out", tmp_path / "out") == 2
    assert replay(trace, "--out", trace) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert f"--out: {trace} is a file, expected a directory" in out.err
    assert out.err.count("is a directory, expected a file") == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "small.jsonl"]


def test_a_device_is_written_to_and_never_replaced(trace: Path, tmp_path: Path) -> None:
    """A rename would put a file in the place of /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert replay(trace, "--policy", "random", "--per-request", pipe, "--limit", 3, "--jobs", 1) == 0
    assert os.read(reader, 1 << 16).count(b"\n") == 3
    os.close(reader)
    assert pipe.is_fifo()


def test_a_full_disk_leaves_the_old_results_and_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(b"old")

    def full(self: Path, _: bytes) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*results\.json'"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_does_not_cost_the_table(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "results.json")

    monkeypatch.setattr(command, "replace_file", full)
    assert replay(trace, "--policy", "random", "--out", tmp_path, "--jobs", 1) == 1
    out = capsys.readouterr()
    assert "random" in out.out
    assert "No space left on device: 'results.json'" in out.err


def test_a_reader_of_the_table_who_goes_away_costs_no_results(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Gone())
    with pytest.raises(BrokenPipeError):
        command.replay(parsed(trace, "--policy", "random", "--out", str(tmp_path), "--jobs", "1"))
    assert json.loads((tmp_path / "results.json").read_text())["runs"]


def test_traces_of_one_name_are_reported_apart(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recordings of two workers are `rec.jsonl.0` and `rec.jsonl.1`: both were called `rec.jsonl`."""
    paths = [tmp_path / f"rec.jsonl.{number}" for number in range(2)]
    for path in paths:
        path.write_bytes(trace.read_bytes())
    assert replay(*paths, trace, trace, "--policy", "random", "--jobs", 1) == 0
    out = capsys.readouterr().out
    assert re.findall(r"(?m)^(\S+): 60 requests in", out) == [*map(str, paths), "small"]
    assert len(re.findall(r"(?m)^random ", out)) == 3


def test_an_interrupted_replay_does_not_pass_for_done(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "execute_all", interrupted)
    assert replay(trace) == 130
    assert capsys.readouterr().err == "ranvier: interrupted, nothing was written\n"


def parsed(trace: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args([str(trace), *words])
