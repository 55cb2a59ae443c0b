"""What is collected here only where the native module was built."""

from importlib.util import find_spec

collect_ignore = (
    []
    if find_spec("kvindex.wire._native")
    else ["test_backends_agree.py", "test_choosing_agrees.py", "test_queries_agree.py"]
)
