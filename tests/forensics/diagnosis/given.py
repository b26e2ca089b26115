"""Evidence that the tests of this folder start from: a spike of a GPT, and an operation to blame."""

import math
from dataclasses import replace

from stabletrain.forensics.diagnosis.evidence import Evidence, RunSettings
from stabletrain.forensics.facts import Drift, Outcome
from stabletrain.forensics.trace.origin import Origin
from stabletrain.records import Reading

READING = Reading(50, 9.0, {}, 80.0, 1.0, 0.0, 0.0, 0.0, 1.0, False, False, False, 3e-3)
SETTING = RunSettings(
    choices={"precision": "fp32", "qknorm": "none", "qkclip": "none", "zloss": "none", "softcap": "none"},
    values={"optimizer.lr": 3e-3},
    has_attention=True,
    loss_limit=6.0,
    norm_limit=20.0,
)
FINE, BAD, NAN = Outcome(True, 4.0, 1.0), Outcome(True, 9.0, 80.0), Outcome(False, math.nan, math.nan)
CALM = Drift(steps=10, moved=1e-3, share=1e-3, grown=1.0, adaptive=True)
SPIKE = Evidence(
    "spike",
    READING,
    outcomes={
        "same": replace(BAD, bitwise_equal_to_reading=True),
        "fp32": BAD,
        "fresh_batch": BAD,
        "older_state": FINE,
    },
    drift=CALM,
    setting=SETTING,
)


def origin(op="aten.div", why="overflow", dtype="float32", in_fp32=math.inf, module="part", direction="forward"):
    return Origin(
        module, op, direction, "model.py:7", "", "", dtype, (), (), "producer", why, "words", in_fp32, in_fp32, (), 3
    )
