"""Why is the hit rate zero? An examination of engines, their ports, their streams, from outside."""

from kvindex.tools.doctor.case import Target
from kvindex.tools.doctor.causes import CAUSES, Cause
from kvindex.tools.doctor.examine import examine
from kvindex.tools.doctor.finding import Finding
from kvindex.tools.doctor.limits import Limits
from kvindex.tools.doctor.prompts import Prompt
from kvindex.tools.doctor.report import Examined, Report
from kvindex.tools.doctor.zmtp import Peer, look

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
