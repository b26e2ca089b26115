"""When a run ends, its own page is written. It is a convenience: a run never fails or ends otherwise because of it."""

from pathlib import Path

from stabletrain.tracking.metrics import replace, warn


class NoPage:
    """Writes nothing: what `report=false` asks for, and what every rank but the first has."""

    def write(self, sample: str | None = None) -> None:
        """Nothing is written."""
        del sample


class PageAtEnd(NoPage):
    """Writes `report.html` of the run in `folder`; what reads and draws is loaded only then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, sample: str | None = None) -> None:
        """Writes the page, and `sample.txt` where there is a sample; what goes wrong is one warning.

        Args:
            sample: text that the finished model wrote; None leaves what is there.
        """
        try:
            if sample is not None:
                replace(self.folder / "sample.txt", sample.encode("utf-8", "replace").decode("utf-8"))
            from stabletrain.compare.pages.one_run import write_run_page

            write_run_page(self.folder)
        except Exception as error:  # the record is whole without a page
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            warn(f"{self.folder / 'report.html'} could not be written ({reason}): the run is not affected")
