"""`stabletrain wandb-report`: compares the runs of a project in a report on Weights & Biases (W&B).

The report shows which setting tolerates which learning rates, the curves and throughput on each card, and incidents. It
needs `wandb-workspaces`, which the extra `report` installs. `specification` needs neither an account nor a network.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stabletrain.errors import ConfigError, StabletrainError, closest
from stabletrain.printable import say
from stabletrain.program import conf_folder
from stabletrain.tracking.columns import COLUMNS, IN_WANDB
from stabletrain.tracking.wandb_setup import check_reach

CURVES = {
    "train/loss": "Training loss",
    "val/loss": "Validation loss",
    "grad/norm": "Gradient norm, before clipping",
    "clip/fraction": "Fraction of recent updates that were clipped",
    "monitors/attn_logit_max": "Largest attention logit",
    "monitors/headroom_min": "Headroom below the largest fp16 number, in powers of two",
    "monitors/update_margin": "How many times as long the update could be before the loss rises",
    "monitors/norm_variance_min": "Smallest variance in a normalisation layer, over its eps",
}
"""Metrics that are drawn over the steps for each card, and the titles of their plots."""

LOGARITHMIC = {"grad/norm", "monitors/attn_logit_max", "monitors/update_margin", "monitors/norm_variance_min"}
"""Metrics in `CURVES` that need a logarithmic axis."""

THROUGHPUT = {
    "tokens_per_s": "Tokens per second",
    "images_per_s": "Images per second",
    "throughput/mfu": "MFU: fraction of the card's peak",
    "memory/peak_gb": "Peak memory, GB",
}
"""Metrics that are compared between cards; a CPU has no MFU."""

INSTABILITY = {
    "incident/count": "Incidents",
    "guard/skipped": "Skipped steps",
    "guard/rollbacks": "Rollbacks",
    "spike/score": "Spike score: fraction of losses that were spikes",
}
"""Metrics that show how unstable a run was."""

MEAN_AND_RANGE: dict[str, Any] = {"groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"}
"""What a plot shows of the runs of a group."""

RATE, LOSS = "optimizer.lr", "val/loss"

WIDE, HALF, ROW = 24, 12, 8
"""Width of the panel grid, half of it, and the height of a panel."""


def specification(
    entity: str,
    project: str,
    sweeps: Sequence[str] = (),
    by: str = "stability",
    title: str = "",
    runs: Sequence[Path] = (),
) -> Any:
    """Builds the report without saving it. Does not use the network.

    Args:
        entity, project: the project whose runs are compared.
        sweeps: compare only the runs of these W&B groups; empty means all runs.
        by: the config group, such as `precision`, or the key, such as `model.n_layer`, by which runs are compared.
        title: title of the report; by default it names the sweeps or the project.
        runs: folders of the same runs on this machine; the report then begins with their settings compared, the rows
            of `stabletrain compare --by`.

    Raises:
        ConfigError: the extra is not installed, `by` is neither a config group nor a key, a folder contains no runs,
            or no two of its runs differ in `by`.
    """
    try:
        import wandb_workspaces.reports.v2 as wr
    except ImportError as error:
        raise ConfigError(
            f"wandb-report needs wandb-workspaces ({error}): pip install 'stabletrain[report]'"
        ) from error

    setting, card = wr.Config(setting_key(by)), wr.Metric("JobType")
    table = wr.WeavePanelSummaryTable(table_name="incidents", layout=wr.Layout(w=WIDE, h=2 * ROW))

    def panels(found: list[Any]) -> Any:
        return wr.PanelGrid(runsets=[runset(wr, setting, sweeps)], panels=found)

    return wr.Report(
        entity=entity,
        project=project,
        title=title or f"Runs compared: {', '.join(sweeps) or project}"[:128],
        width="fluid",
        blocks=[
            *compared(wr, runs, by),
            wr.H1(f"Sensitivity by {by}"),
            wr.P(
                "If the loss of a setting stays low over a wide range of learning rates, its mean is close to its "
                "lowest loss. A run that ended in NaN is only in the table of runs: it has no point here and is not "
                "part of any mean. stabletrain compare counts such a run as its loss at init."
            ),
            panels(placed(sensitivity_panels(wr, setting, by))),
            wr.H1("By card"),
            wr.P("Mean and range of the runs on each card."),
            panels(placed([*curve_panels(wr, card), *bar_panels(wr, THROUGHPUT, card)])),
            wr.H1("Incidents"),
            wr.P("The skipped steps that were investigated, one row each, with the cause and the fix."),
            panels([*placed(bar_panels(wr, INSTABILITY, setting)), below(table, len(INSTABILITY))]),
        ],
    )


def compared(wr: Any, runs: Sequence[Path], by: str) -> list[Any]:
    """Returns the blocks that compare the settings of runs on this machine; none without runs.

    W&B's own means leave runs that ended in NaN out; these rows count them, and pair the runs by seed.
    """
    if not runs:
        return []
    from stabletrain.beside.comparison.by_setting import markdown, sentence, settings_of
    from stabletrain.beside.comparison.frames import frame

    settings = settings_of(frame(*runs), [by])
    about = (
        "Mean and standard deviation of the final validation loss, at the best learning rate; the difference to the "
        "best setting is paired over the runs that agree in everything else. Runs that broke are counted, and enter no "
        "mean."
    )
    said = [wr.P(each) for each in (sentence(settings), about) if each]
    return [wr.H1(f"Settings compared by {by}"), *said, wr.MarkdownBlock(markdown(settings))]


def runset(wr: Any, setting: Any, sweeps: Sequence[str]) -> Any:
    """Returns the runs of the report, lowest validation loss first, and the columns of their table."""
    filters = f"Metric('Group') in {json.dumps([*sweeps])}" if sweeps else ""
    measured = [f"summary:{key}" for name in IN_WANDB for key in COLUMNS[name].summary]
    settings = [f"config:{backend(setting.name)}", f"config:{backend(RATE)}"]
    columns = ["run:displayName", "run:state", *settings, *measured]
    order = [wr.OrderBy(wr.SummaryMetric(LOSS), ascending=True)]
    return wr.Runset(name="Runs", filters=filters, order=order, pinned_columns=columns[:1], visible_columns=columns)


def bar_panels(wr: Any, names: Mapping[str, str], key: Any) -> list[Any]:
    """Returns a bar plot per metric, grouped by `key`: mean, lowest and highest."""
    return [wr.BarPlot(title=text, metrics=[name], groupby=key, **MEAN_AND_RANGE) for name, text in names.items()]


def sensitivity_panels(wr: Any, setting: Any, by: str) -> list[Any]:
    """Returns plots of the final loss by setting and by learning rate."""
    rate, loss = wr.Config(RATE), wr.SummaryMetric(LOSS)

    def axis(metric: Any, text: str, log: bool = False) -> Any:
        return wr.ParallelCoordinatesPlotColumn(metric=metric, display_name=text, log=log or None)

    rates = wr.ScatterPlot(
        title="Final validation loss by learning rate",
        x=rate,
        y=loss,
        log_x=True,
        legend_template="${run:displayName}",
    )
    ways = wr.ParallelCoordinatesPlot(
        title="From setting to loss",
        columns=[axis(setting, by), axis(rate, RATE, log=True), axis(loss, LOSS)],
    )
    losses = bar_panels(wr, {LOSS: f"Final validation loss by {by}: mean, lowest, highest"}, setting)
    return [*losses, rates, ways, wr.ParameterImportancePlot(with_respect_to=LOSS)]


def curve_panels(wr: Any, card: Any) -> list[Any]:
    """Returns line plots of the mean over the runs on each card."""
    return [
        wr.LinePlot(title=text, x="step", y=[name], log_y=name in LOGARITHMIC or None, groupby=card, **MEAN_AND_RANGE)
        for name, text in CURVES.items()
    ]


def setting_key(by: str) -> str:
    """Returns the W&B config key of a config group's option or of a key; raises ConfigError if neither exists."""
    conf = conf_folder()
    groups = sorted(folder.name for folder in conf.iterdir() if folder.is_dir())
    keys = re.findall(r"^(\w+):", (conf / "config.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    if by in groups:
        return f"groups.{by}"
    if "." not in by and by not in keys:
        near = closest(by, [*groups, *keys]) or f"one of {', '.join(groups)}, or a key"
        raise ConfigError(f"--by {by}: there is no such group or key; did you mean {near}?")
    return by


def backend(key: str) -> str:
    """Converts a config key to the name that W&B's table of runs uses: `optimizer.lr` becomes `optimizer.value.lr`."""
    first, *rest = key.split(".")
    return ".".join([first, "value", *rest])


def placed(panels: Sequence[Any]) -> list[Any]:
    """Places the panels, two per row."""
    for number, panel in enumerate(panels):
        panel.layout.x, panel.layout.y = number % 2 * HALF, number // 2 * ROW
        panel.layout.w, panel.layout.h = HALF, ROW
    return [*panels]


def below(panel: Any, panels: int) -> Any:
    """Places a panel below that many `placed` panels."""
    panel.layout.y = (panels + 1) // 2 * ROW
    return panel


def save(report: Any, entity: str, project: str, draft: bool) -> str:
    """Saves a report and returns its URL.

    Raises:
        ConfigError: there is no API key, the project does not exist, or the server does not answer.
        StabletrainError: W&B could not save the report.
    """
    check_reach()
    import wandb

    try:
        known = [found.name for found in wandb.Api().projects(entity)]
        if project in known:
            return report.save(draft=draft).url
    except Exception as error:  # of any type: its first line is the reason
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StabletrainError(f"{entity}/{project}: the report was not saved: {words}") from error
    there = f"existing projects are {', '.join(known[:10])}" if known else f"{entity} has none that this key can see"
    raise ConfigError(f"the project {entity}/{project} does not exist: {there}; `stabletrain sync` uploads runs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `stabletrain wandb-report`."""
    parser.add_argument("project", metavar="entity/project", help="the project whose runs are compared")
    parser.add_argument("--sweep", action="append", default=[], help="only runs of this W&B group; can be repeated")
    parser.add_argument("--by", default="stability", help="the group or key to compare by (default: %(default)s)")
    parser.add_argument(
        "--runs", type=Path, nargs="+", default=[], help="folders of the same runs here: adds a table of their settings"
    )
    parser.add_argument("--title", default="", help="title of the report")
    parser.add_argument("--draft", action="store_true", help="save it as a draft")
    parser.add_argument("--json", action="store_true", help="only print the report as JSON; needs no account")


def run(arguments: argparse.Namespace) -> None:
    """Builds the report; saves it and prints its URL, or prints it as JSON. Raises as `specification` and `save`."""
    entity, slash, project = arguments.project.partition("/")
    if not (entity and slash and project) or "/" in project:
        raise ConfigError(f"{arguments.project!r} is not entity/project: name both, such as my-team/stabletrain")
    report = specification(entity, project, arguments.sweep, arguments.by, arguments.title, arguments.runs)
    if arguments.json:
        say(json.dumps(spec(report), indent=2))
    else:
        say(f"report   {save(report, entity, project, arguments.draft)}")


def spec(report: Any) -> dict[str, Any]:
    """Converts a report to the JSON values that W&B would receive."""
    return json.loads(report._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))
