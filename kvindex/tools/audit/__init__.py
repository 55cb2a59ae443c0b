"""The cost of a fleet's routing and caches, from KV-cache events alone.

`Auditor` receives what an `EventStream` yields and makes an `AuditReport`; `text_of` and `html_of`
write it for people. Nothing is sent to the engines, and no request is needed.
"""

from kvindex.tools.audit.auditor import Auditor
from kvindex.tools.audit.pages import html_of, text_of
from kvindex.tools.audit.report import (
    AuditReport,
    Bar,
    Bucket,
    Capacity,
    Duplication,
    RankReport,
    Saving,
    SharedPrefix,
    Tokens,
)

__all__ = [
    "AuditReport",
    "Auditor",
    "Bar",
    "Bucket",
    "Capacity",
    "Duplication",
    "RankReport",
    "Saving",
    "SharedPrefix",
    "Tokens",
    "html_of",
    "text_of",
]
