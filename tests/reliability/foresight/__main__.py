"""`python -m tests.reliability.foresight record|pack|fit|act|score|draw`: see docs/evidence/foresight.md.

record --processes 2      trains all cases that have no recording yet; may be stopped and started again
pack                      compresses the recordings, to be committed
fit                       fits the forecast's model on the committed recordings, and writes it into the package
act --processes 2         trains on from the alarms, with the named fix and without; may be stopped and started again
score                     prints the tables of docs/evidence/foresight.md
draw                      draws its pictures
"""

import argparse
import sys
from pathlib import Path

from tests.reliability.foresight.cases import FITTED
from tests.reliability.foresight.record import Recording
from tests.reliability.foresight.runs import record_all
from tests.reliability.foresight.store import COMMITTED, pack, read

FOLDER = Path("outputs") / "foresight"


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.foresight", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="train the cases that have no recording")
    recording.add_argument("--processes", type=int, default=1)
    recording.add_argument("--only", default="", help="beginnings of case names, separated by commas")
    for name, text, folder in (
        ("pack", "compress the recordings", FOLDER),
        ("fit", "fit the forecast's model", COMMITTED),
        ("act", "train on from the alarms", COMMITTED),
        ("score", "print the tables", COMMITTED),
        ("draw", "draw the pictures", COMMITTED),
    ):
        commands.add_parser(name, help=text).add_argument("--folder", type=Path, default=folder)
    commands.choices["act"].add_argument("--processes", type=int, default=1)
    commands.choices["draw"].add_argument(
        "--to", type=Path, default=Path("docs/evidence"), help="folder of the pictures"
    )
    recording.add_argument("--folder", type=Path, default=FOLDER, help="of the recordings that are not packed")
    given = parser.parse_args(arguments)
    if given.command == "record":
        return record_all(given.folder, given.processes, tuple(given.only.split(",")))
    if given.command == "pack":
        for file in pack([*read(COMMITTED), *read(given.folder)], COMMITTED):
            print(f"{file.name}: {file.stat().st_size / 2**20:.2f} MiB")
    elif given.command == "fit":
        fit_model(given.folder)
    elif given.command == "act":
        return act_at_alarms(given.folder, given.processes)
    elif given.command == "draw":
        draw(given.folder, given.to)
    else:
        score(given.folder)
    return 0


def fit_model(folder: Path) -> None:
    """Fits the forecast's model, and writes it into the package."""
    from stabletrain.beside.forecast.model import FILE
    from tests.reliability.foresight.fit import as_json, fit
    from tests.reliability.foresight.looks import watch
    from tests.reliability.foresight.tables import fitting_runs

    model = fit(*fitting_runs(watch(recording for recording in read(folder) if for_fit(recording))))
    FILE.write_text(as_json(model))
    print(as_json(model))


def score(folder: Path) -> None:
    """Prints the tables."""
    from tests.reliability.foresight.looks import watch
    from tests.reliability.foresight.results import results

    print(results(watch(read(folder))))


def act_at_alarms(folder: Path, processes: int) -> int:
    """Acts on the runs with an alarm."""
    from stabletrain.beside.forecast.model import fitted
    from tests.reliability.foresight.act import act_all
    from tests.reliability.foresight.fit import probabilities
    from tests.reliability.foresight.looks import watch
    from tests.reliability.foresight.saved import to_act_on

    runs = watch(read(folder))
    scores = {each.run.name: probabilities(each, fitted()) for each in runs}
    return 1 if act_all(to_act_on(runs, scores, fitted().alarm), processes) else 0


def draw(folder: Path, to: Path) -> None:
    """Draws the pictures."""
    from tests.reliability.foresight.looks import watch
    from tests.reliability.foresight.pictures import draw_all

    for file in draw_all(watch(read(folder)), to):
        print(file)


def for_fit(recording: Recording) -> bool:
    """Whether a recording may be looked at while fitting."""
    return recording["case"].partition("/")[0] in (*FITTED, "hot", "tame")


if __name__ == "__main__":
    sys.exit(main())
