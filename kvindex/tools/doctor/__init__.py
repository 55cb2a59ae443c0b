"""Why is the hit rate zero? An examination of engines, their ports, their streams, from outside.

`examine` asks and tests all targets and returns a `Report` of `Finding`s. `causes.py` lists every
kind of finding with its sentence and its remedy. Read first: `examine.py`, then `case.py`.
"""

from kvindex.tools.doctor.case import Limits, Target
from kvindex.tools.doctor.causes import CAUSES, Cause
from kvindex.tools.doctor.examine import examine
from kvindex.tools.doctor.prompts import UserPrompt
from kvindex.tools.doctor.report import Examined, Finding, Report
from kvindex.tools.doctor.zmtp import Peer, look

__all__ = [
    "CAUSES",
    "Cause",
    "Examined",
    "Finding",
    "Limits",
    "Peer",
    "Report",
    "Target",
    "UserPrompt",
    "examine",
    "look",
]
