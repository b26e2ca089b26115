"""Writes a run's own page when the run ends. A failure prints a warning and never affects the run."""

from pathlib import Path

from stabletrain.extension import NoPage
from stabletrain.printable import warn
from stabletrain.tracking.metrics import replace


class PageAtEnd(NoPage):
    """Writes `report.html` into the run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, sample: str | None = None) -> None:
        """Writes the page, and writes `sample` to `sample.txt`. If this fails, prints a warning and raises nothing."""
        try:
            if sample is not None:
                replace(self.folder / "sample.txt", sample.encode("utf-8", "replace").decode("utf-8"))
            # Imported only here: a run without a page needs none of it.
            from stabletrain.beside.comparison.pages.one_run import write_run_page

            write_run_page(self.folder)
        except Exception as error:  # the run's record is complete without the page
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            warn(f"{self.folder / 'report.html'} could not be written ({reason}): the run is not affected")

    def write_if_missing(self) -> bool:
        """Writes the page of a run that is over if it was killed before it had written it; returns whether it did."""
        page, record = self.folder / "report.html", self.folder / "run.json"
        try:  # a page from before the run was continued is older than its record
            missing = not page.exists() or page.stat().st_mtime_ns < record.stat().st_mtime_ns
        except OSError:
            return False
        if missing:
            self.write()
        return missing and page.exists()
