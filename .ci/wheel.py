"""Builds the source distribution and the wheel, and uses the wheel as a user does: installed, in an empty folder.

    python .ci/wheel.py

Needs the packages `build` and `twine`. The wheel gets a new environment, which finds everything but stabletrain
in this one.
"""

import csv
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TINY = [
    *("model.n_layer=2", "model.n_head=2", "model.n_embd=16", "data.block_size=16", "batch_size=4", "eval_batches=2"),
    *("device=cpu", "wandb=disabled", "steps=8"),
]
"""A GPT whose steps take some milliseconds."""


def main() -> None:
    """Builds, installs and uses the wheel; raises if anything is not as expected."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        archive, wheel = built(place / "dist")
        check_description(archive, wheel)
        check_archive(archive)
        check_content(wheel)
        user = User(installed(wheel, place / "venv"), place / "empty")
        train_and_diagnose(user)
        sweep_and_compare(user)
        call_from_python(user)
        refuse_slurm(user)
    print(f"{wheel.name}: built, and used away from the checkout")


def built(folder: Path) -> tuple[Path, Path]:
    """Builds the source distribution, and from it the wheel; returns both."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, stdout=subprocess.DEVNULL)
    [archive], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    print(f"{archive.name}: {archive.stat().st_size:,} bytes; {wheel.name}: {wheel.stat().st_size:,} bytes", flush=True)
    return archive, wheel


def check_description(archive: Path, wheel: Path) -> None:
    """Checks that a package index can show the description: it renders, and has no relative link or picture."""
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", archive, wheel], check=True)
    with zipfile.ZipFile(wheel) as content:
        [metadata] = [name for name in content.namelist() if name.endswith(".dist-info/METADATA")]
        text = content.read(metadata).decode()
    relative = [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("https://")]
    assert not relative, f"links that break on a package index: {relative}"


def check_archive(archive: Path) -> None:
    """Checks that the source distribution has what the wheel is built from, no tests or recordings, and is small."""
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    wanted = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "PACKAGE.md", "README.md", "pyproject.toml", "setup.py"}
    assert wanted <= names, f"missing {sorted(wanted - names)}"
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert folders == {"conf", "stabletrain", "stabletrain.egg-info"}, f"unexpected {sorted(folders)}"
    assert archive.stat().st_size < 3_000_000, f"{archive.stat().st_size:,} bytes"


def check_content(wheel: Path) -> None:
    """Checks that the wheel holds the tracked files of `stabletrain/` and of `conf/`, and no others."""
    command = ["git", "-C", ROOT, "ls-files", "stabletrain", "conf"]
    tracked = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    wanted = {name if name.startswith("stabletrain/") else f"stabletrain/{name}" for name in tracked}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == wanted, f"missing {sorted(wanted - found)}, unexpected {sorted(found - wanted)}"


def installed(wheel: Path, venv: Path) -> Path:
    """Installs the wheel into a new environment; returns the folder of its programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, cwd=venv, env=environment())
    # Python reads the .pth files of this folder only, so an editable install of the checkout is not found.
    [packages] = venv.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return venv / "bin"


def environment() -> dict[str, str]:
    """Returns the environment variables without those by which Python could find the checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


class User:
    """Types commands in the new environment.

    Attributes:
        folder: the working folder, empty at first.
    """

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self.folder = programs, folder
        folder.mkdir()

    def types(self, *words: str | Path, code: int = 0) -> subprocess.CompletedProcess:
        """Runs a program of the new environment; raises if its exit code is another than `code`."""
        print("+", *words, flush=True)
        command = [self._programs / words[0], *words[1:]]
        done = subprocess.run(command, cwd=self.folder, env=environment(), capture_output=True, text=True)
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def status(self, run: str) -> str:
        """Returns how a run ended."""
        return json.loads((self.folder / run / "run.json").read_text())["status"]


def train_and_diagnose(user: User) -> None:
    """Trains with a fault, continues the run, and explains and replays the incident."""
    package = user.types("python", "-c", "import stabletrain; print(stabletrain.__file__)").stdout
    assert ROOT not in Path(package).parents, package
    faulty = [*TINY, "faults=label", "faults.at=[5]", "hydra.run.dir=run"]
    done = user.types("stabletrain", "train", *faulty)
    assert user.status("run") == "finished"
    assert done.stdout.splitlines()[-1].startswith("next     stabletrain train -m "), done.stdout
    user.types("stabletrain", "train", *faulty, "steps=10", "resume=auto")
    [incident] = json.loads(user.types("stabletrain", "diagnose", "run", "--json").stdout)
    assert incident["cause"] == "bad_label", incident
    user.types("stabletrain", "replay", incident["folder"], "precision=fp32")
    user.types("stabletrain", "sample", "run", "--tokens", "5")
    assert "stabletrain train --help lists" in user.types("stabletrain", "train", "zzz=1", code=2).stderr


def sweep_and_compare(user: User) -> None:
    """Sweeps over two runs, and compares them in a table and on a page."""
    user.types("stabletrain", "train", "-m", *TINY, "seed=0,1", "hydra.sweep.dir=sweep")
    assert [user.status(f"sweep/{number}") for number in range(2)] == ["finished"] * 2
    user.types("stabletrain", "compare", "sweep", "--csv", "runs.csv")
    with (user.folder / "runs.csv").open() as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["finished"] * 2
    assert "uPlot" in (user.folder / "sweep" / "report.html").read_text(encoding="utf-8")


def call_from_python(user: User) -> None:
    """Trains, loads and compares from Python, and guards a loop of its own."""
    user.types("python", ROOT / "examples" / "guard_loop.py")
    user.types("python", ROOT / "examples" / "train_and_load.py", "steps=20", "device=cpu")


def refuse_slurm(user: User) -> None:
    """Checks that one message says where Slurm's launcher is."""
    done = user.types("python", "-m", "stabletrain.beside.slurm", "--dry-run", code=2)
    assert done.stderr.count("\n") == 1, done.stderr
    assert "pip install -e ." in done.stderr, done.stderr


if __name__ == "__main__":
    main()
