"""Diagnoses an incident: the first rule that holds gives the cause; further causes that contribute are listed.

A later rule is often only another explanation of the same evidence. So a contributing cause needs evidence of its own:
its rule holds, and so does its condition in this table.

| contributing cause | condition |
|---|---|
| bad labels | the batch also has bad inputs |
| the operation where non-finite values began | the batch has an outlier in its inputs |
| updates too long, attention logits, log Z | the same batch is normal with older weights |
| the batch | another batch is normal, and the samples that make the step fail are known |

At a learning rate far above the optimizer's usual one, causes that updates bring about are diagnosed as at any other
rate, but the usual rate is the first fix: with any other fix the run soon fails in another way. If the diagnosis is the
learning rate, twice the usual one is enough for that.

Nothing contributes to a weight that was never initialised, a corrupt state or a hardware fault: they explain everything
that was measured after them.
"""

from dataclasses import replace

from stabletrain.forensics.diagnosis.cause_table import Diagnosis
from stabletrain.forensics.diagnosis.causes import (
    RULES,
    Rule,
    attention_logit_growth,
    bad_batch,
    bad_init,
    bad_inputs,
    bad_label,
    corrupt_state,
    fp8_overflow,
    fp16_overflow,
    hardware_fault,
    lr_too_high,
    optimizer_staleness,
    output_logit_drift,
    poison_input,
    uninitialised,
    unknown,
    unsafe_op,
    updates_too_large,
    updates_too_long,
    zero_variance_norm,
)
from stabletrain.forensics.diagnosis.evidence import Evidence, moved_too_far
from stabletrain.forensics.diagnosis.wording import FAR_TOO_HIGH, HIGH, usual_rate

OPERATION_RULES = (zero_variance_norm, fp16_overflow, fp8_overflow, unsafe_op)
"""Rules that explain a single operation; only the first that holds is used."""

GROWTH_RULES = (updates_too_long, attention_logit_growth, output_logit_drift)
"""Rules about one quantity that has grown, although most weights have not moved too far."""


BY_UPDATES = (
    *(bad_init, updates_too_large, updates_too_long, attention_logit_growth, output_logit_drift),
    *(bad_batch, optimizer_staleness, lr_too_high),
)
"""Rules about what updates that are too long bring about, too."""


def diagnose(e: Evidence) -> Diagnosis:
    """Returns the diagnosis of the first rule that holds, with the causes that contribute."""
    for rule in RULES:
        if (found := rule(e)) is not None:
            alone = rule in (uninitialised, corrupt_state, hardware_fault)
            others = [] if alone else [other(e) for other in contributing_rules(e) if other is not rule]
            found = replace(found, also=[one for one in others if one is not None and one.cause != found.cause])
            return usual_rate_first(found, e) if rule in BY_UPDATES else found
    return unknown(e)


def usual_rate_first(found: Diagnosis, e: Evidence) -> Diagnosis:
    """Returns a diagnosis whose first fix is the usual learning rate, if the run's is far above it."""
    times = HIGH if found.cause == "lr_too_high" else FAR_TOO_HIGH
    usual = usual_rate(e.setting.values, e.setting.usual_lr, times)
    if usual is None or e.reading.step == 1:  # before the first update the rate has had no effect
        return found
    others = [each for each in found.fix if not each.startswith(("optimizer.lr=", "warmup.steps="))]
    return replace(found, fix=[f"optimizer.lr={usual:g}", *others])


def contributing_rules(e: Evidence) -> list[Rule]:
    """The rules whose causes contribute if they hold."""
    if poison_input(e):
        return [bad_label]  # bad inputs: the step is not replayed, so there is no other evidence
    if e.normal("same"):
        return []  # the replay is normal: it shows no further cause
    rules: list[Rule] = []
    if bad_inputs(e):
        rules += [rule for rule in OPERATION_RULES if rule(e)][:1]
    if e.normal("older_state"):
        # If all weights have moved too far, so have the logits.
        rules += [updates_too_large] if moved_too_far(e) else GROWTH_RULES
    if e.culprits is not None and e.culprits.samples and not e.culprits.others_too:
        rules.append(bad_batch)
    return rules
