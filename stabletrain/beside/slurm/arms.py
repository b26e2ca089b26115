"""The array job of `stabletrain whatif --slurm`: its options, and its script, a task per arm.

The options are those of `slurm/launch.sh`, and so are cluster.conf, the environment and the requeueing of a job. A task
has one GPU and one process.
"""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stabletrain.beside.slurm.request import Card, Request, add_job_options, check_checkout, read_cluster
from stabletrain.beside.slurm.script import ROOT, Job, first_lines, last_lines
from stabletrain.config.arguments import Arguments
from stabletrain.errors import ConfigError
from stabletrain.machine.slurm import has_slurm


@dataclass(frozen=True)
class ArmJob:
    """Submits arms; see `ArmArray` in `whatif/array.py`.

    Attributes:
        card: the GPU type.
        request: what was typed.
    """

    card: Card
    request: Request

    def __str__(self) -> str:
        most = self.request.parallel_jobs
        return f"a Slurm array on {self.card.name}, one task per arm{f', at most {most} at once' if most else ''}"

    def script(self, folder: Path, arms: Sequence[Path]) -> str:
        """Returns the text of the batch script.

        Raises:
            ConfigError: the time limit is not longer than the notice, or the folder's name contains quotes, a backslash
                or a line break.
        """
        job = Job(self.card, folder, [*range(len(arms))], [], [], Path.cwd())
        lines = [*first_lines(job, self.request, "stabletrain whatif"), 'case "$SLURM_ARRAY_TASK_ID" in']
        lines += [f"  {number}) folder={shlex.quote(str(arm))} ;;" for number, arm in enumerate(arms)]
        # An arm that has no checkpoint yet begins anew, in an empty folder.
        lines += ["esac", f'notes_folder={shlex.quote(str(folder))}/"$SLURM_ARRAY_TASK_ID"']
        lines.append(f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}")
        lines += last_lines(job, self.request, '-m stabletrain.beside.whatif.arm_run "$notes_folder/arm_run.json"')
        return "\n".join(lines) + "\n"


def add_array_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--slurm`, and the options of its array."""
    group = parser.add_argument_group("as a Slurm array", "settings of the cluster: slurm/README.md")
    group.add_argument("--slurm", action="store_true", help="run each arm as a task of an array job, and wait for them")
    group.add_argument("--gpu", default="any", metavar="CARD", help="a section of cluster.conf (%(default)s)")
    add_job_options(group)


def read_array(chosen: argparse.Namespace) -> ArmJob | None:
    """Returns what submits the arms; None without `--slurm`.

    Raises:
        ConfigError: an option has an invalid value, or needs `--slurm`; or there is no Slurm here. With `--list` it is
            not needed.
    """
    if not chosen.slurm:
        plain = argparse.ArgumentParser()
        add_array_options(plain)
        for name, usual in vars(plain.parse_args([])).items():
            if getattr(chosen, name) != usual:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} {getattr(chosen, name)}: the arms run on this machine; fix: add --slurm")
        return None
    check_checkout("run its `stabletrain whatif --slurm`")
    own = {"cards": [chosen.gpu], "parallel_jobs": chosen.jobs, "dry_run": chosen.list}
    request = Request.of(chosen, nodes=1, gpus=1, arguments=Arguments([], []), **own)
    found = ArmJob(read_cluster(chosen.cluster, chosen.gpu), request)
    found.script(chosen.run, [chosen.run])  # what cannot be submitted is refused before anything is written
    if not chosen.list and not has_slurm():
        raise ConfigError(
            "--slurm: there is no sbatch here; fix: type the command on a login node of the cluster, or leave out "
            "--slurm and run the arms on this machine"
        )
    return found
