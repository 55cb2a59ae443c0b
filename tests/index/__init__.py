"""Tests of the index. Failed checks of its stories show what they compared."""

import pytest

pytest.register_assert_rewrite("tests.index.index_stories")
