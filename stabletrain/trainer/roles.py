"""For build.py and changes.py: the roles' null classes, by the names that they had."""

from typing import Any

from stabletrain.checkpoint.off import NoCheckpoints
from stabletrain.comparison.pages.at_end import NoPage
from stabletrain.tracking.run_folder import NoRunFolder
from stabletrain.tracking.tracker import NoTracker
from stabletrain.tracking.wandb import NoWandb

Tracker = NoTracker
RunFolder = NoRunFolder
WandbRun = NoWandb
Page = NoPage
Checkpoints = NoCheckpoints
Resumption = Any  # `changes.NoResumption`, which cannot be imported here
