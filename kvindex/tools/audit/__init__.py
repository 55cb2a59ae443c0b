"""The cost of a fleet's routing and caches, from KV-cache events alone.

`Auditor` receives what an `EventStream` yields and makes a `Report`; `text_of` and `html_of` write
it for people. Nothing is sent to the engines, and no request is needed.
"""

from kvindex.tools.audit.auditor import Auditor
from kvindex.tools.audit.page import html_of
from kvindex.tools.audit.report import (
    Bar,
    Bucket,
    Duplication,
    RankReport,
    Report,
    Saving,
    SharedPrefix,
    Tokens,
)
from kvindex.tools.audit.text import text_of

__all__ = [
    "Auditor",
    "Bar",
    "Bucket",
    "Duplication",
    "RankReport",
    "Report",
    "Saving",
    "SharedPrefix",
    "Tokens",
    "html_of",
    "text_of",
]
