"""Order, gaps, duplicates and restarts of one publisher's batches: a pure state machine.

Nothing in here knows sockets, threads or clocks, nor what a batch holds. The theory of operation is
at the top of `sequencer.py`.
"""

from kvindex.subscribe.sequencer.applied import Cursor
from kvindex.subscribe.sequencer.config import ReplayPolicy, SequencerConfig
from kvindex.subscribe.sequencer.sequencer import Sequencer
from kvindex.subscribe.sequencer.values import (
    MAX_COUNT,
    MAX_SEQ,
    Action,
    AskReplay,
    Batch,
    CloseReplay,
    RankBatch,
    RankLost,
    RankRestarted,
    State,
)

__all__ = [
    "MAX_COUNT",
    "MAX_SEQ",
    "Action",
    "AskReplay",
    "Batch",
    "CloseReplay",
    "Cursor",
    "RankBatch",
    "RankLost",
    "RankRestarted",
    "ReplayPolicy",
    "Sequencer",
    "SequencerConfig",
    "State",
]
