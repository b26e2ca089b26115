"""Explains an incident after it happened: replays the step, finds the cause and suggests fixes.

Nothing in this package runs before the first incident. This file imports nothing, so that `stabletrain diagnose` works
without importing torch.

| file | |
|---|---|
| handler | investigates incidents within a time budget and writes their folders |
| distributed_handler | the same on several ranks, of which one writes the folder |
| agreement | how ranks agree after every part, and serve each other's requests |
| investigate | gathers the evidence of one incident, on copies |
| subject | the step under investigation: how to run it again, and the questions about it |
| facts | plain results: of a replay, of the search for samples, of a damaged tensor |
| rerun | running a step again, here or in a user's own loop: variants, outcome, true fp32, copies of the model |
| repro | everything needed to replay a step of `train.py` |
| replay | replays a step of `train.py`, unchanged or with one thing changed |
| saved_step | the files of a step |
| user_code | hashes of the user's source files that the step runs through |
| probes/samples, state | finds bad samples of the batch, and corrupt weights and moments |
| probes/attention_scores | finds the largest attention logit |
| probes/underflow | finds gradients that underflow to 0 in fp16 |
| trace/recorder, values, callers | records every operation of a step, and where non-finite values began |
| trace/origin, arithmetic, nonfinite_rules | the operation to blame, and why its result was not finite |
| diagnosis/ | the evidence, the rules that derive the cause from it, and the fixes |
| incident, report | writes diagnosis.json and report.md into the incident's folder |
| incident_list | reads a run's incidents back from their folders |
"""
