"""For build.py, stages.py, tools.py and contract.py: the roles' null classes, by the names that they had."""

from collections.abc import Callable

from stabletrain.data.dataset import Dataset
from stabletrain.faults.planned import NoFaults
from stabletrain.forecast.forecast import NoForecast
from stabletrain.forensics.handler import NoIncidentHandler
from stabletrain.machine.determinism import Off
from stabletrain.monitors.monitors import NoMonitors
from stabletrain.parallel.single import SingleProcess
from stabletrain.stability.clipping import NoClip
from stabletrain.stability.guard import NoGuard
from stabletrain.stability.init import TorchInit
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.tracking.wandb import NoWandb

GuardOption = NoGuard
ClippingOption = NoClip
PrecisionOption = FullPrecision
DeterminismOption = Off
ParallelOption = SingleProcess
MonitorsOption = NoMonitors
ForecastOption = NoForecast
FaultsOption = NoFaults
WandbOption = NoWandb
InitOption = TorchInit
ForensicsOption = NoIncidentHandler
QKClipOption = NoQKClip
OptimizerOption = Callable
DataOption = Dataset
