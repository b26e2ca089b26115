"""`check=first_step`: what can be seen of a run before its first step, at a small part of the cost of a step.

Parameters and groups, the first batches, and the range of the numbers. Nothing is called but the data set, which looks
its batches up by number.
"""

from collections.abc import Sequence

from stabletrain.beside.preflight.data import Targets, data_of
from stabletrain.beside.preflight.finding import Finding
from stabletrain.beside.preflight.headroom import headroom_of
from stabletrain.beside.preflight.own_run import mode_of
from stabletrain.beside.preflight.structure import structure_of
from stabletrain.checkpoint.tree import is_sharded
from stabletrain.extension import NoPreflight
from stabletrain.records import IGNORE_INDEX
from stabletrain.several_optimizers import optimizers_of
from stabletrain.trainer.run import TrainingRun

BATCHES = 2
"""Batches that are looked at; reading more of them could take longer than a step."""


class FirstStep(NoPreflight):
    """Looks at a run before its first step."""

    def look(self, run: TrainingRun) -> Sequence[Finding]:
        """Returns what is wrong or unusual."""
        try:
            found = findings_of(run)
        except Exception as error:  # of the user's data or model: training itself will report it
            found = [Finding("first_step", "note", f"could not be checked: {type(error).__name__}: {error}")]
        return [each for each in found if each.verdict in ("fault", "note")]


def findings_of(run: TrainingRun) -> list[Finding]:
    """Returns what the checks say of a run that is ready for its first step."""
    model, optimizers = run.state.model, optimizers_of(run.state.optimizer)
    found = structure_of(model, optimizers)
    if not any(is_sharded(each) for each in model.parameters()):  # of a shard nothing is known of the whole tensor
        found += headroom_of(model, optimizers, mode_of(run.tools.precision))
    batches = [run.data.load(run.state.step + number) for number in range(BATCHES)]
    tensors = [(each.inputs, each.targets) for each in batches]
    classes = not tensors[0][1].is_floating_point()
    return found + data_of([tensors], [Targets("batch[1]", ignored=IGNORE_INDEX if classes else None)])
