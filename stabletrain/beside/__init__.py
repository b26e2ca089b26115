"""What is used beside a run: it reads runs, starts several of them, or tries things on them.

| folder or file | |
|---|---|
| `adapters` | `Guard` as a callback of Lightning and of the Trainer of transformers |
| `commands` | the commands of `stabletrain` that are here: compare, whatif, export, forecast ... |
| `comparison` | runs side by side: reading, data frame, table, pages |
| `export` | a trained model for other programs |
| `extension` | what the run itself may ask for (`stabletrain/extension.py`) |
| `faults` | faults injected on purpose |
| `forecast` | trouble foretold from the monitors |
| `rate_finder` | a peak learning rate, from short runs at several rates |
| `slurm` | sweeps and what-ifs as array jobs |
| `sweep` | `-m`: several runs from one command |
| `wandb_report`, `wandb_sync` | a project's report, and the upload of offline runs |
| `whatif` | fixes tried from the state before a trouble; the same after a halt |

Nothing outside imports this folder: `train.py` trains without it.
"""
