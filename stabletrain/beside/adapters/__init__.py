"""The guard (`guard/`) in other libraries' training loops, each by `Guard.attach`.

| file | |
|---|---|
| callback | what both callbacks share; a step that is run again leaves the user's objects as they were |
| lightning | `GuardCallback` for `lightning.pytorch.Trainer`; needs the extra `lightning` |
| transformers | `GuardCallback` for `transformers.Trainer`; needs the extra `transformers` |
"""
