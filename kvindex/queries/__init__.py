"""What servers need around `match`: a query's JSON to tokens, and an answer to JSON.

Both are done for a whole prompt and for all ranks at once, without a Python object for each token
or rank. Nothing here knows HTTP.
"""

from kvindex.errors import QueryError
from kvindex.queries.answers import AnswerForm
from kvindex.queries.reading import Query, read_query

__all__ = ["AnswerForm", "Query", "QueryError", "read_query"]
