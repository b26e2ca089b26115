"""Every line is valid JSON with every number in it, and an interrupted run's file ends as an uninterrupted one's."""

import errno
import json
import math
import os
import subprocess
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest
import torch

from stabletrain.errors import ConfigError
from stabletrain.tracking.metrics import Metrics, read_jsonl, replace


def strict(path):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def without_time(lines):
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def test_nan_and_infinities_are_written_as_words_and_read_as_numbers(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.log(3, {"train/loss": math.nan, "grad/norm": math.inf, "x": -math.inf, "deep": {"y": [math.nan]}})
    [line] = strict(tmp_path / "metrics.jsonl")
    assert (line["train/loss"], line["grad/norm"], line["x"], line["deep"]) == (
        "NaN", "Infinity", "-Infinity", {"y": ["NaN"]}
    )  # fmt: skip
    [line] = read_jsonl(tmp_path / "metrics.jsonl")
    assert math.isnan(line["train/loss"])
    assert (line["grad/norm"], line["x"]) == (math.inf, -math.inf)
    assert math.isnan(line["deep"]["y"][0])


def test_floats_keep_every_bit(tmp_path):
    generator = np.random.default_rng(0)
    values = [float(v) for v in generator.integers(0, 2**63, 500).view(np.float64) if math.isfinite(v)]
    Metrics(tmp_path).log(0, {str(i): v for i, v in enumerate(values)})
    [line] = read_jsonl(tmp_path / "metrics.jsonl")
    assert [line[str(i)] for i in range(len(values))] == values


def test_scalars_of_numpy_and_torch_are_numbers(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.log(0, {"a": np.float32(0.5), "b": torch.tensor(math.nan), "c": np.int64(3), "d": True, "e": None})
    [line] = strict(tmp_path / "metrics.jsonl")
    assert [line[k] for k in "abcde"] == [0.5, "NaN", 3, True, None]


def test_every_line_is_on_disk_when_the_call_returns(tmp_path):
    metrics = Metrics(tmp_path)
    for step in range(3):
        metrics.log(step, {"x": step})
        assert len(strict(tmp_path / "metrics.jsonl")) == step + 1


def test_a_line_says_step_and_time_and_an_event_its_kind(tmp_path):
    metrics, before = Metrics(tmp_path), time.time()
    metrics.log(5, {"x": 1})
    metrics.event("skip", 6, reason="grad", norm=math.inf)
    [line], [event] = strict(tmp_path / "metrics.jsonl"), strict(tmp_path / "events.jsonl")
    assert line["step"] == 5
    assert before - 1 <= line["time"] <= time.time() + 1
    assert (event["event"], event["step"], event["reason"], event["norm"]) == ("skip", 6, "grad", "Infinity")
    assert abs(datetime.fromisoformat(event["time"]) - datetime.now(timezone.utc)).total_seconds() < 60


@pytest.mark.parametrize("torn", ['{"step": 9, "tr', '{"step": 9, "x": 1.0}', "{"])
def test_after_a_kill_and_a_rewind_the_file_ends_as_if_nothing_had_happened(tmp_path, torn):
    def train(folder, steps):
        metrics = Metrics(folder)
        for step in steps:
            metrics.log(step, {"train/loss": math.nan if step == 4 else 1 / 3**step})
        return metrics

    train(tmp_path / "straight", range(1, 11))
    train(tmp_path / "killed", range(1, 9)).event("skip", 7)
    for name in ("metrics.jsonl", "events.jsonl"):
        with open(tmp_path / "killed" / name, "a") as file:
            file.write(torn)  # with or without its end: no newline, no line
    again = Metrics(tmp_path / "killed")
    again.rewind(5)
    assert [line["step"] for line in strict(tmp_path / "killed" / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    again.close()
    train(tmp_path / "killed", range(6, 11)).event("resume", 5)
    straight, killed = (strict(tmp_path / name / "metrics.jsonl") for name in ("straight", "killed"))
    assert without_time(straight) == without_time(killed)
    events = strict(tmp_path / "killed" / "events.jsonl")
    assert [(event["event"], event["step"]) for event in events] == [("skip", 7), ("resume", 5)]


def test_a_torn_line_longer_than_a_block_is_dropped(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.log(1, {"x": 1})
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(whole + b"y" * 200_000)
    Metrics(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole
    (tmp_path / "metrics.jsonl").write_bytes(b"y" * 200_000)
    Metrics(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_rewinding_is_at_once_or_not_at_all(tmp_path, monkeypatch):
    metrics = Metrics(tmp_path)
    for step in range(5):
        metrics.log(step, {})
    whole = (tmp_path / "metrics.jsonl").read_bytes()

    def fail(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="broken"):
        metrics.rewind(2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole
    monkeypatch.undo()
    metrics.log(5, {})
    assert len(strict(tmp_path / "metrics.jsonl")) == 6


def test_lines_of_several_threads_do_not_mix(tmp_path):
    metrics = Metrics(tmp_path)

    def write(number):
        for step in range(100):
            metrics.event("x" * number * 50, step)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(strict(tmp_path / "events.jsonl")) == 400


FULL = """
import resource, sys
from pathlib import Path
from stabletrain.errors import ConfigError
from stabletrain.tracking.metrics import Metrics
metrics = Metrics(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (250, resource.RLIM_INFINITY))
for step in range(10):
    metrics.log(step, {"x": 0.1})
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
metrics.log(10, {"x": 0.1})
"""


def test_a_full_disk_costs_lines_and_one_warning_and_tears_nothing(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)
    lost, again = done.stderr.splitlines()
    assert "metrics.jsonl cannot be written (only part of a line was written): lines are lost from here on" in lost
    assert "metrics.jsonl is written again; lost lines: " in again
    steps = [line["step"] for line in strict(tmp_path / "metrics.jsonl")]
    assert steps[-1] == 10
    assert steps[:-1] == list(range(len(steps) - 1))
    assert len(steps) < 10


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_neither_read_nor_written(tmp_path, make):
    """A pipe would block for ever."""
    make(tmp_path / "metrics.jsonl")
    assert read_jsonl(tmp_path / "metrics.jsonl") == []
    with pytest.raises(ConfigError, match="metrics cannot be written"):
        Metrics(tmp_path)


def test_the_reader_leaves_out_what_is_no_object(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"step": 1}\n\nnot json\n[1]\n"NaN"\n{"step": 2}\n{"a": ')
    assert read_jsonl(file) == [{"step": 1}, {"step": 2}]
    assert read_jsonl(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_lines_are_not_written_through_a_link(tmp_path, name):
    (tmp_path / "valuable").write_text("no newline at the end")
    (tmp_path / name).symlink_to("valuable")
    with pytest.raises(ConfigError, match="cannot be written"):
        Metrics(tmp_path)
    assert (tmp_path / "valuable").read_text() == "no newline at the end"


@pytest.mark.parametrize("name", ["record.json", ".record.json.tmp"])
def test_a_file_is_not_replaced_through_a_link(tmp_path, name):
    (tmp_path / "valuable").write_text("valuable")
    (tmp_path / name).symlink_to("valuable")
    replace(tmp_path / "record.json", "new")
    assert (tmp_path / "valuable").read_text() == "valuable"
    assert (tmp_path / "record.json").read_text() == "new"
    assert not (tmp_path / "record.json").is_symlink()
