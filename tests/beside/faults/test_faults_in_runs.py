"""Several faults in whole runs: each faulty step is skipped, and planned faults change nothing before they happen."""

import pytest
import torch

from stabletrain.beside.faults.plan import KINDS
from stabletrain.tracking.metrics import read_jsonl
from tests.beside.faults.given import CADENCE, NEVER, bad_elements, ran
from tests.runs import TINY_GPT, TINY_RESNET

SMALL = {"gpt": TINY_GPT, "resnet": [*TINY_RESNET, "model.depth=8"]}


def everything(state):
    moments = {
        f"{number}/{key}": value
        for number, kept in enumerate(state.optimizer.state.values())
        for key, value in kept.items()
    }
    return {**state.model.state_dict(), **moments}


def plan(*entries):
    return ["faults=plan", f"faults.faults=[{','.join(entries)}]"]


@pytest.mark.slow(unless=lambda model: model == "gpt")
@pytest.mark.parametrize(("model", "precision"), [("gpt", "bf16"), ("resnet", "fp32")])
def test_a_run_whose_faults_are_still_to_come_is_the_run_without_any(tmp_path, model, precision):
    kinds = [f"{{kind:{kind},at:[{NEVER}]}}" for kind in KINDS if kind != "wandb"]
    given = [*SMALL[model], *CADENCE, f"precision={precision}", "grad_accum_steps=2"]
    clean, _ = ran(tmp_path / "clean", *given)
    other, _ = ran(tmp_path / "faults", *given, *plan(*kinds))
    one, two = everything(clean.state), everything(other.state)
    assert list(one) == list(two)
    assert all(torch.equal(one[key], two[key]) for key in one if isinstance(one[key], torch.Tensor))
    counted = [(len(list(j.state.model.parameters())), len(list(j.state.model.buffers()))) for j in (clean, other)]
    assert counted[0] == counted[1]
    assert not any(module._forward_hooks for module in other.state.model.modules())
    lines = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("clean", "faults")]
    assert [line.get("train/loss") for line in lines[0]] == [line.get("train/loss") for line in lines[1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "precision", "fused"),
    [
        ("gpt", "fp32", "true"),
        ("gpt", "bf16", "false"),
        ("gpt", "fp16", "true"),
        ("resnet", "fp32", "false"),
        ("resnet", "bf16", "true"),
        ("resnet", "fp16", "false"),
    ],
)
def test_faults_are_withheld_at_their_steps_and_at_no_other(tmp_path, model, precision, fused):
    faults = plan("{kind:gradient,at:[3]}", "{kind:activation,at:[5]}", "{kind:label,at:[7]}", "{kind:empty,at:[9]}")
    given = [*SMALL[model], *CADENCE, f"precision={precision}", f"optimizer.fused={fused}", "grad_accum_steps=2"]
    if precision == "fp16":
        given += ["precision.init_scale=64.0", "model.n_layer=1" if model == "gpt" else "batch_size=4"]
    job, events = ran(tmp_path, *given, *faults)
    skips = [(event["step"], event["kind"]) for event in events if event["event"] == "skip"]
    # A step that may be the machine's fault is taken again, at one more tick: then it is applied.
    first = [(4, "overflow"), (6, "nonfinite")] if precision == "fp16" else [(4, "nonfinite"), (5, "nonfinite")]
    assert skips == [*first, (8, "bad_data"), (10, "bad_data")]
    assert job.state.executed_steps == (13 if precision == "fp16" else 14)
    assert job.tools.guard.machine_faults == (1 if precision == "fp16" else 2)
    assert not bad_elements(value for value in everything(job.state).values() if isinstance(value, torch.Tensor))
