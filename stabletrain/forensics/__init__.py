"""What explains an incident, once there is one; nothing here runs before.

Nothing is imported here: whoever reads incidents back (`found`) needs no torch.

| file | |
|---|---|
| desk | incidents come in, are looked into within a budget, and filed |
| council | the desks of several ranks: the guilty one files |
| explain | one incident: evidence is gathered, on copies |
| evidence | what was found |
| signs, causes, fixes, words | from evidence to cause, to what to do, and to sentences |
| incident, page | the folder: diagnosis.json, and report.md for people |
| found | the incidents of a run, read back from their folders |
| samples, state | what is wrong with the batch, and with weights and moments |
| scene, saved | what running a step again needs, in memory and as files |
| replay, guilty | the step again, with one thing changed; which samples are to blame |
| trace, sources, callers, values | every operation of a step, and where non-finite numbers began |
| origin, arithmetic, singular | the operation to blame, and why it had no finite result |
| scores | how large the numbers are that a model takes a softmax of |
| underflow | which gradients fp16 has made 0 |
"""
