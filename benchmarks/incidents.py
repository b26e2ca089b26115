"""The duration of a diagnosis in steps of the same run: from a skipped update to the finished incident folder.

Three incidents: an activation that is NaN once and finite when the step is replayed; one sample for which the model
divides by 0, which takes the most passes because the culprit sample is searched for; and a spike, from one step with a
far too large learning rate. Memory is the peak during the diagnosis and during an ordinary step.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from jobs import Rounds, built
from measuring import Clock, most_memory
from torch import Tensor, nn

AT = {"activation": 4, "sample": 7, "spike": 11}
"""Steps, from 0, whose updates are skipped. The spike comes last because the weights stay ruined after it."""


def break_down(marked: Tensor, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Returns the output, divided by 0 for the marked sample."""
    other = (inputs[0] != marked).flatten(1).any(1)
    return output / other.view(-1, *[1] * (output.ndim - 1)).to(output.dtype)


def diagnoses(folder: Path, overrides: Sequence[str], clock: Clock) -> dict[str, dict[str, float]]:
    """Returns each incident's diagnosis time, a step's time in the same run, and the peak memory of both."""
    activation = f"{{kind: activation, at: [{AT['activation']}]}}"
    # One tick later than the step before the spike: the step with the activation is taken twice.
    burst = f"{{kind: learning_rate, at: [{AT['spike']}], factor: 100000.0}}"
    freely = (
        "forensics.max_seconds=100000",
        "optimizer.lr=1e-4",
        "faults=plan",
        f"faults.faults=[{activation},{burst}]",
    )
    job = built(folder, (*overrides, *freely))
    device, marked = job.device, job.data.load(AT["sample"]).inputs[:1].to(job.device)
    first = next(module for module in job.state.model.modules() if not [*module.children()])
    first.register_forward_hook(lambda *given: break_down(marked, *given))
    run, steps, heights, found = Rounds(job), [], [0], {}
    while len(found) < len(AT):
        taken, memory = {}, {}
        for part in (run.compute, run.judge, run.commit):
            with most_memory(device) as memory[part.__name__]:
                taken[part.__name__] = clock.seconds(part)
        judged = job.state.step - 2
        if judged in AT.values():
            name = next(name for name, step in AT.items() if step == judged)
            found[name] = {"seconds": taken["judge"], "memory": max(memory["judge"], default=0)}
        elif judged >= 0:  # the first one warms up
            steps.append(sum(taken.values()))
            heights += [height for part in memory.values() for height in part]
    run.close()
    filed = [json.loads(path.read_text()) for path in sorted((folder / "incidents").glob("*/diagnosis.json"))]
    kinds = {each["step"] - 1: each["kind"] for each in filed}
    assert kinds == {step: "spike" if name == "spike" else "nonfinite" for name, step in AT.items()}, f"filed: {kinds}"
    ordinary = {"step": statistics.median(steps), "step_memory": max(heights)}
    return {name: {**each, **ordinary} for name, each in found.items()}
