"""`stabletrain wandb-report`: a project's runs compared in a report of Weights & Biases, made by its own library.

It asks what one asks of a sweep: which setting bears which learning rate, what the runs look like on each card, and
what went wrong. `specification` needs neither account nor network; `wandb-workspaces`, the library's part for reports,
is the extra `report`.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stabletrain.errors import ConfigError, StabletrainError, closest
from stabletrain.tracking.columns import COLUMNS, IN_WANDB
from stabletrain.tracking.wandb_setup import check_reach

CONF = Path(__file__).parents[2] / "conf"

CURVES = {
    "train/loss": "Training loss",
    "val/loss": "Validation loss",
    "grad/norm": "Gradient norm, before clipping",
    "clip/fraction": "Share of the last updates that were clipped",
    "monitors/attn_logit_max": "Largest attention logit",
    "monitors/headroom_min": "Headroom to fp16's largest number, in powers of two",
}
"""What is drawn over the steps for each card, and its title."""

LOGARITHMIC = {"grad/norm", "monitors/attn_logit_max"}
"""Those of them that span orders of magnitude."""

PACE = {
    "tokens_per_s": "Tokens a second",
    "images_per_s": "Images a second",
    "throughput/mfu": "MFU: share of the card's peak",
    "memory/peak_gb": "Peak memory, GB",
}
"""What is compared between cards; a CPU has no MFU."""

TROUBLE = {
    "incident/count": "Incidents",
    "guard/skipped": "Updates withheld",
    "guard/rollbacks": "Rollbacks",
    "spike/score": "Spike score: share of the losses that were spikes",
}
"""What tells how badly a run went."""

RATE, LOSS = "optimizer.lr", "val/loss"

WIDE, HALF, ROW = 24, 12, 8
"""Of the grid that panels are placed in: its width, half of it, and a panel's height."""


def specification(entity: str, project: str, sweeps: Sequence[str] = (), by: str = "stability", title: str = "") -> Any:
    """The report, not yet saved; nothing is asked of the network.

    Args:
        entity, project: whose runs are compared.
        sweeps: only the runs of these groups; none: all.
        by: a config group, such as `precision`, or a key, such as `model.n_layer`: what the runs differ in.
        title: of the report; without one it is named by the sweeps or the project.

    Raises:
        ConfigError: the extra is not installed, or `by` is nothing that runs could differ in.
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
            wr.H1(f"Sensitivity by {by}"),
            wr.P(
                "The wider the range of learning rates at which a setting's loss stays low, the closer its mean lies "
                "to its lowest. A run that ended in NaN has no point and no part in a mean here, only its line in the "
                "table of runs; stabletrain compare counts it as its loss at init."
            ),
            panels(placed(sensitivity_panels(wr, setting, by))),
            wr.H1("By card"),
            wr.P("The mean of the runs on each card, and their range."),
            panels(placed([*curve_panels(wr, card), *bar_panels(wr, PACE, card)])),
            wr.H1("Incidents"),
            wr.P("Steps whose update was withheld, why, and what to do: a line for each that was looked into."),
            panels([*placed(bar_panels(wr, TROUBLE, setting)), below(table, len(TROUBLE))]),
        ],
    )


def runset(wr: Any, setting: Any, sweeps: Sequence[str]) -> Any:
    """The runs of the report, lowest validation loss first, and the columns of their table.

    Args:
        wr: the library, which is imported only when a report is made.
        setting: what the runs differ in.
        sweeps: only the runs of these groups; none: all.
    """
    filters = f"Metric('Group') in {json.dumps([*sweeps])}" if sweeps else ""
    measured = [f"summary:{key}" for name in IN_WANDB for key in COLUMNS[name].summary]
    settings = [f"config:{backend(setting.name)}", f"config:{backend(RATE)}"]
    columns = ["run:displayName", "run:state", *settings, *measured]
    order = [wr.OrderBy(wr.SummaryMetric(LOSS), ascending=True)]
    return wr.Runset(name="Runs", filters=filters, order=order, pinned_columns=columns[:1], visible_columns=columns)


def bar_panels(wr: Any, names: Mapping[str, str], key: Any) -> list[Any]:
    """Bars of each metric, grouped by `key`: mean, lowest and highest."""
    grouped: dict[str, Any] = {"groupby": key, "groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"}
    return [wr.BarPlot(title=text, metrics=[name], **grouped) for name, text in names.items()]


def sensitivity_panels(wr: Any, setting: Any, by: str) -> list[Any]:
    """Final losses by setting and by learning rate."""
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
    """The mean curve of the runs on each card, over the steps."""
    return [
        wr.LinePlot(
            title=text,
            x="step",
            y=[name],
            log_y=name in LOGARITHMIC or None,
            groupby=card,
            groupby_aggfunc="mean",
            groupby_rangefunc="minmax",
        )
        for name, text in CURVES.items()
    ]


def setting_key(by: str) -> str:
    """Where W&B's config has a config group's option, or a key's value.

    Raises:
        ConfigError: there is neither a group nor a top-level key of that name.
    """
    groups = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())
    keys = re.findall(r"^(\w+):", (CONF / "config.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    if by in groups:
        return f"groups.{by}"
    if "." not in by and by not in keys:
        near = closest(by, [*groups, *keys]) or f"one of {', '.join(groups)}, or a key"
        raise ConfigError(f"--by {by}: there is no such group or key; did you mean {near}?")
    return by


def backend(key: str) -> str:
    """`optimizer.lr` as `optimizer.value.lr`: how a column of the table of runs names a config key."""
    first, *rest = key.split(".")
    return ".".join([first, "value", *rest])


def placed(panels: Sequence[Any]) -> list[Any]:
    """The panels, two in a row."""
    for number, panel in enumerate(panels):
        panel.layout.x, panel.layout.y = number % 2 * HALF, number // 2 * ROW
        panel.layout.w, panel.layout.h = HALF, ROW
    return [*panels]


def below(panel: Any, panels: int) -> Any:
    """The panel, under so many that are `placed`."""
    panel.layout.y = (panels + 1) // 2 * ROW
    return panel


def save(report: Any, entity: str, project: str, draft: bool) -> str:
    """Saves a report; returns its address.

    Raises:
        ConfigError: there is no key or no such project, or the server does not answer.
        StabletrainError: the library could not save it.
    """
    check_reach()
    import wandb

    try:
        known = [found.name for found in wandb.Api().projects(entity)]
        if project in known:
            return report.save(draft=draft).url
    except Exception as error:  # whatever it is, the library has words for it
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StabletrainError(f"{entity}/{project}: the report was not saved: {words}") from error
    there = f"there are {', '.join(known[:10])}" if known else f"{entity} has none that this key can see"
    raise ConfigError(f"{entity}/{project} is no project: {there}; `stabletrain sync` uploads runs to one")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `stabletrain wandb-report`."""
    parser.add_argument("project", metavar="entity/project", help="whose runs are compared")
    parser.add_argument("--sweep", action="append", default=[], help="only runs of this group; may be given again")
    parser.add_argument("--by", default="stability", help="the group or key to compare by (default: %(default)s)")
    parser.add_argument("--title", default="", help="of the report")
    parser.add_argument("--draft", action="store_true", help="save it as a draft")
    parser.add_argument("--json", action="store_true", help="only print its specification; needs no account")


def run(arguments: argparse.Namespace) -> None:
    """Makes the report and prints its address, or its specification.

    Raises:
        ConfigError: the project is not named as entity/project, or as `specification` and `save`.
    """
    entity, slash, project = arguments.project.partition("/")
    if not (entity and slash and project) or "/" in project:
        raise ConfigError(f"{arguments.project!r} is not entity/project: name both, such as my-team/stabletrain")
    report = specification(entity, project, arguments.sweep, arguments.by, arguments.title)
    if arguments.json:
        print(json.dumps(spec(report), indent=2))
    else:
        print(f"report   {save(report, entity, project, arguments.draft)}")


def spec(report: Any) -> dict[str, Any]:
    """What the library would send, as plain JSON values."""
    return json.loads(report._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))
