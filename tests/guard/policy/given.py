"""Readings and gates for the tests of the guards."""

import torch

from stabletrain.records import GradNorms, LossTerms, Reading, StepChecks


def reading(
    loss=1.0, norm=1.0, applied=True, bad_data=False, overflow=False, scale=1.0, step=7, inputs=1.0, buffers=1.0
):
    return Reading(step, loss, {}, norm, 1.0, 0.0, inputs, buffers, scale, applied, bad_data, overflow, 1e-3)


def gate(guard, loss, norm, bad_data=False, inputs=1.0, buffers=1.0):
    """Whether a guard's gate is open, which is the same if the host knows the other numbers already."""
    terms, norms = LossTerms(torch.tensor(loss)), GradNorms(torch.tensor(norm), torch.tensor([norm]))
    numbers = float(bad_data), inputs, buffers
    on_device, known = (guard.gate(terms, norms, StepChecks(*each)) for each in (map(torch.tensor, numbers), numbers))
    assert torch.equal(on_device, known)
    return bool(known)


def feed(guard, losses, norms=None, first_step=1):
    """A guard's verdicts on steps with these losses, each applied if its own gate is open."""
    verdicts = []
    for i, loss in enumerate(losses):
        norm = 1.0 if norms is None else norms[i]
        open_ = gate(guard, loss, norm)
        verdicts.append(guard.judge(reading(loss, norm, applied=open_, step=first_step + i)))
    return verdicts
