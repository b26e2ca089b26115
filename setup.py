"""Puts `conf/` into the built package as `stabletrain/conf`; everything else is in pyproject.toml.

An editable install takes `conf/` from the checkout (`stabletrain/program.py`).
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithConf(build_py):
    """Copies `conf/` beside the modules."""

    def run(self) -> None:
        """Builds into an empty folder, because an earlier build may have left modules and options that are gone."""
        package = Path(self.build_lib, "stabletrain")
        if not self.editable_mode:
            shutil.rmtree(package, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            shutil.copytree("conf", package / "conf")


setup(cmdclass={"build_py": WithConf})
