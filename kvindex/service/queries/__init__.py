"""What servers need around `match`: a query's JSON to tokens, and an answer to JSON.

Both are done by the native module for a whole prompt and for all ranks at once, without a Python
object for each token or rank. Nothing here knows HTTP.
"""

from kvindex.wire.backend import why_not_native

try:
    import kvindex.wire._native  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"kvindex.service needs the native module: {why_not_native()}", name=error.name
    ) from error

from kvindex.service.queries.answers import AnswerForm
from kvindex.service.queries.reading import Query, read_query
from kvindex.wire.errors import QueryError

__all__ = ["AnswerForm", "Query", "QueryError", "read_query"]
