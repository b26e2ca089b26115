"""The columns of a comparison: for the data frame and its CSV, the table, the page and the W&B report.

Each column is defined once, for all of these outputs. Each output has its own order of columns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


def as_text(value: Any) -> str:
    """Formats a name or a whole number."""
    return str(value)


def digits(places: int) -> Callable[[float], str]:
    """Returns a formatter with that many decimal places."""
    return lambda value: f"{value:.{places}f}"


def three_digits(value: float) -> str:
    """Formats a number with three significant digits."""
    return f"{value:.3g}"


def percent(value: float) -> str:
    """Formats a fraction as a percentage."""
    return f"{100 * value:.1f} %" if value >= 1e-3 or value == 0 else f"{100 * value:.2g} %"


def thousands(value: float | int) -> str:
    """Formats a number with three digits: 950, 14.6k, 7.00k, 1.20M."""
    size, letter = (1e6, "M") if value >= 999.5e3 else (1e3, "k") if value >= 999.5 else (1, "")
    return f"{value / size:#.3g}".rstrip(".") + letter  # `#` keeps zeros, so the width of a line does not jump


def duration(value: float | int) -> str:
    """Formats seconds briefly: 48 s, 12 min, 3.4 h."""
    return f"{value / 3600:.1f} h" if value >= 3600 else f"{value / 60:.0f} min" if value >= 600 else f"{value:.0f} s"


class Column(NamedTuple):
    """A column.

    Attributes:
        name: name in the data frame.
        dtype: pandas dtype; empty if only the table has the column.
        text: formats a value for the table.
        head: heading in the table; empty if the table does not have the column.
        about: explanation on the page.
        page: flags for the page's table; `high` sorts in descending order first.
        summary: keys in the summary of a W&B run.
        higher_is_better: whether the table sorts the column in descending order.
        on_page: heading on the page; None for that of the table, empty if the page does not have the column.
    """

    name: str
    dtype: str
    text: Callable[[Any], str] = as_text
    head: str = ""
    about: str = ""
    page: tuple[str, ...] = ()
    summary: tuple[str, ...] = ()
    higher_is_better: bool = False
    on_page: str | None = None

    @property
    def page_head(self) -> str:
        """Heading on the page; empty if the page does not have the column."""
        return self.head if self.on_page is None else self.on_page


HIGH = ("high",)

LR_ALONE = "to the learning rate, over runs that differ only in learning rate and seed"
SPIKY = "fraction of steps whose loss was a spike, or that were skipped as a spike"
HEALED = "halts after which the run went on with a fix that it had tried"
SPEED, MFU = "tokens, images or samples per second", "model FLOP/s as a fraction of the card's peak"

COLUMNS = {
    column.name: column
    for column in (
        Column("run", "object"),
        Column("sweep", "object", head="sweep"),
        Column("status", "object", head="status", page=("status",)),
        Column("problem", "object", on_page="note"),
        Column("steps", "Int64", head="steps", page=HIGH),
        Column("val_loss", "float64", digits(4), "val loss", "last value, nats", summary=("val/loss",)),
        Column("best_val_loss", "float64", digits(4), "best", summary=("best/val_loss",), on_page="best val loss"),
        Column("best_step", "Int64", about="step of the best validation loss", on_page="at step"),
        Column("val_accuracy", "float64", percent, "accuracy", "", HIGH, ("val/accuracy",), True, "val accuracy"),
        Column("loss_at_init", "float64", on_page="loss at init"),
        Column("diverged", "bool", head="diverged", page=HIGH),
        Column("sensitivity", "float64", digits(3), "sensitivity", LR_ALONE),
        Column("spike_score", "float64", percent, "spikes", SPIKY, HIGH, ("spike/score",), on_page="spike score"),
        Column(
            "skips", "Int64", as_text, "skips", "skipped steps, whose update was not applied", HIGH, ("guard/skipped",)
        ),
        Column("rollbacks", "Int64", head="rollbacks", page=HIGH, summary=("guard/rollbacks",)),
        Column("healings", "Int64", as_text, "healings", HEALED, HIGH),
        Column("incidents", "Int64", head="incidents", page=HIGH),
        Column("cause", "object", head="first cause", summary=("incident/cause",)),
        Column("forecasts", "Int64", as_text, "forecasts", "times trouble was foretold", HIGH),
        Column(
            "units_per_s", "float64", thousands, "/s", SPEED, HIGH, ("tokens_per_s", "images_per_s"), True, "units/s"
        ),
        Column("unit", "object", on_page="unit"),
        Column("mfu", "float64", percent, "MFU", MFU, HIGH, ("throughput/mfu",), True),
        Column(
            "peak_memory_gb",
            "float64",
            three_digits,
            "peak GB",
            "peak memory, in 1e9 bytes",
            HIGH,
            ("memory/peak_gb",),
            on_page="memory, GB",
        ),
        Column("card", "object", head="card", summary=("card",)),
        Column("precision", "object", head="precision"),
        Column("seed", "Int64"),
        Column("parameters", "Int64", thousands, "parameters", page=HIGH),
        Column("seconds", "float64", duration, "time", page=HIGH, on_page="seconds"),
        Column("gpu_hours", "float64", three_digits, "GPU h", "of all starts, evaluations and checkpoints too", HIGH),
        Column("utilization", "float64", percent, "GPU busy", "share of the time in which the GPUs computed", HIGH),
        Column("energy_kwh", "float64", three_digits, "kWh", "energy of the GPUs, as NVML counts it", HIGH),
        Column("host", "object", on_page="host"),
        Column("job", "object", head="job", about="Slurm's number"),
        Column("range", "", head="lowest-highest", on_page=""),
    )
}
"""The columns by name."""

IN_FRAME = tuple(name for name, column in COLUMNS.items() if column.dtype)
"""Columns of the data frame, in order."""

IN_TABLE = (
    *("val_loss", "range", "best_val_loss", "val_accuracy", "sensitivity", "diverged", "status", "cause", "incidents"),
    *("forecasts", "skips", "rollbacks", "healings", "spike_score", "units_per_s", "mfu", "peak_memory_gb", "card"),
    *("precision", "steps", "parameters", "seconds", "gpu_hours", "utilization", "energy_kwh", "job", "sweep"),
)
"""Columns of the table after the run's name and settings, from left to right."""

BY_IMPORTANCE = (
    *("card", "precision", "status", "val_loss", "cause", "range", "best_val_loss", "val_accuracy", "diverged"),
    *("sensitivity", "healings", "spike_score", "units_per_s", "skips", "rollbacks", "incidents", "mfu"),
    *("gpu_hours", "peak_memory_gb", "forecasts", "seconds", "energy_kwh", "utilization", "steps", "sweep"),
    *("parameters", "job"),
)
"""Columns of the table, the most important first; a narrow table drops them from the end."""

ON_PAGE = (
    *("status", "val_loss", "best_val_loss", "best_step", "val_accuracy", "diverged", "sensitivity", "spike_score"),
    *("skips", "rollbacks", "healings", "incidents", "cause", "forecasts", "units_per_s", "unit", "mfu"),
    *("peak_memory_gb", "card", "precision", "steps", "seconds", "parameters", "loss_at_init", "problem", "sweep"),
    *("gpu_hours", "utilization", "energy_kwh", "host", "job"),
)
"""Columns of the page, from left to right."""

IN_WANDB = (
    *("card", "val_loss", "best_val_loss", "val_accuracy", "spike_score", "skips", "rollbacks", "cause"),
    *("units_per_s", "mfu", "peak_memory_gb"),
)
"""Columns of the W&B report's table of runs, from left to right."""
