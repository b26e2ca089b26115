"""The command `stabletrain whatif`: from what the user typed to the ranking.

Everything lies in `<run>/whatif/step-XXXXXXXX/`, named after the state from which the arms start: `start/` with the
state, a run folder for each arm, `whatif.json` and `whatif.html`. The same command goes on with what is there.
"""

from stabletrain.beside.whatif.driver import WhatIf, locked
from stabletrain.beside.whatif.opening import opening
from stabletrain.beside.whatif.page import write_whatif_page
from stabletrain.beside.whatif.plan import WhatIfOptions, plan
from stabletrain.beside.whatif.report import about_table, command, rows, table, write_json
from stabletrain.errors import ConfigError, Interrupted
from stabletrain.parallel.ranks import current_ranks
from stabletrain.printable import one_line, say


def whatif(options: WhatIfOptions) -> None:
    """Runs a what-if, and prints the result.

    Raises:
        ConfigError: it cannot be run as the options say.
        Interrupted: a signal arrived; the same command goes on.
    """
    if current_ranks().launched:
        raise ConfigError("the arms run in one process each; fix: run stabletrain whatif without torchrun")
    planned = plan(options)
    say(opening(planned, options), flush=True)
    with locked(planned.folder):
        try:
            result = WhatIf(planned, options.jobs, options.slurm).run()
        except Interrupted:
            raise Interrupted("the what-if was stopped, its states are saved; fix: type it again", saved=True) from None
    say(f"\n{table(rows(result))}\n")
    for line in (*about_table(result), result.ranking.verdict):
        say(one_line(line))
    if typed := command(result):
        say(f"continue {typed}")
    say(f"page     {write_whatif_page(result)}")
    say(f"numbers  {write_json(result)}")
