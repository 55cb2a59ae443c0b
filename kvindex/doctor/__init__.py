"""Why is the hit rate zero? An examination of engines, their ports, their streams, from outside."""

from kvindex.doctor.case import Target
from kvindex.doctor.causes import CAUSES, Cause
from kvindex.doctor.examine import examine
from kvindex.doctor.finding import Finding
from kvindex.doctor.limits import Limits
from kvindex.doctor.prompts import Prompt
from kvindex.doctor.report import Examined, Report
from kvindex.doctor.zmtp import Peer, look

__all__ = [
    "CAUSES",
    "Cause",
    "Examined",
    "Finding",
    "Limits",
    "Peer",
    "Prompt",
    "Report",
    "Target",
    "examine",
    "look",
]
