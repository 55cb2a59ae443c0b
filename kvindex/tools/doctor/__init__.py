"""Why is the hit rate zero? An examination of engines, their ports, their streams, from outside.

`examine` asks and tests all targets and returns a `Diagnosis` of `Finding`s. `causes.py` lists each
kind of finding with its sentence and its remedy. Read first: `examine.py`, then `case.py`.
"""

from kvindex.tools.doctor.case import Diagnosis, Examined, Finding, Limits, Target
from kvindex.tools.doctor.causes import CAUSES, Cause
from kvindex.tools.doctor.examine import examine
from kvindex.tools.doctor.prompts import UserPrompt

__all__ = [
    "CAUSES",
    "Cause",
    "Diagnosis",
    "Examined",
    "Finding",
    "Limits",
    "Target",
    "UserPrompt",
    "examine",
]
