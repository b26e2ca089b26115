"""What explains an incident, once there is one; nothing here runs before.

Nothing is imported here, so that `stabletrain diagnose` needs no torch.

| file | |
|---|---|
| handler | investigates incidents within a budget and files them; on several ranks, the one at fault files |
| investigate | gathers the evidence of one incident, on copies |
| repro | everything needed to run a step again, in memory and as files |
| replay | runs the step again, with one thing changed |
| probes/samples, state | bad samples of the batch; damage to weights and moments |
| probes/underflow | gradients that underflow to 0 in fp16 |
| trace/recorder, values, callers | every operation of a step, and where non-finite numbers began |
| trace/origin, arithmetic, nonfinite_rules | the operation to blame, and why its result was not finite |
| diagnosis/ | evidence, the rules from evidence to cause, and the fixes |
| incident, report | the incident's folder: diagnosis.json, and report.md for people |
| incident_list | a run's incidents, read back from their folders |
"""
