"""torchrun with one rank on a GPU: NCCL carries a run to its end, through a fault that is investigated.

One rank is all that one GPU allows: NCCL refuses two ranks on the same device. With gloo the same runs work on a CPU.
"""

import json
import math

import pytest

from stabletrain.tracking.metrics import read_jsonl
from tests.devices import CARD
from tests.parallel.launches import trained
from tests.runs import TINY_GPT

pytestmark = pytest.mark.beside

RUN = [*TINY_GPT, "steps=6", "log_every=1", "precision=fp32", "determinism=strict", "compile=false", "monitors=none"]
FAULT = ["faults=gradient", "faults.at=[3]"]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", CARD])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_run_ends_well_after_a_fault_was_skipped_and_investigated(tmp_path, kind, device):
    chosen = [*RUN, *FAULT, f"parallel={kind}", f"device={device}", f"hydra.run.dir={tmp_path / 'run'}"]
    done = trained(1, *chosen, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["hardware"]["device"].startswith(device)
    events = list(read_jsonl(tmp_path / "run" / "events.jsonl"))
    assert [event["step"] for event in events if event["event"] == "skip"] == [4]
    lines = [line for line in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "train/loss" in line]
    assert [line["step"] for line in lines if math.isfinite(line["train/loss"])] == [1, 2, 3, 4, 5, 6]
    diagnosis = json.loads((tmp_path / "run" / "incidents" / "step-00000004" / "diagnosis.json").read_text())
    assert diagnosis["replays"]["same"]["not_run"] == ""
