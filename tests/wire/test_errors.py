"""The tree of errors: each is caught as a stranger would, and travels between processes."""

from __future__ import annotations

import copy
import pickle

import pytest

from kvindex import Rank
from kvindex.wire import errors

pytestmark = pytest.mark.unit

RAISED: list[tuple[errors.KVIndexError, type[Exception]]] = [
    (errors.ConfigurationError("ports collide"), ValueError),
    (errors.DuplicatePublisherError("taken"), KeyError),
    (errors.UnknownRankError(Rank("a", 1), [Rank("b")]), KeyError),
    (errors.TokenError("no token"), ValueError),
    (errors.DecodeError("no batch", size=7), ValueError),
    (errors.QueryError("no token", reason="type", field="token_ids", position=3), ValueError),
    (errors.EncodeError("no field"), ValueError),
    (errors.EndpointRefusedError("not there", reason="network"), PermissionError),
    (errors.RegistrationError("taken", reason="conflict"), ValueError),
    (errors.BusyError(2.5), TimeoutError),
    (errors.InUseError("one at a time"), RuntimeError),
    (errors.ClosedError("closed"), RuntimeError),
    (errors.QueueClosedError("all was read"), errors.ClosedError),
    (errors.SnapshotError("cut off", reason="truncated"), ValueError),
    (errors.SegmentError(28, "no room"), OSError),
    (errors.QueueTimeoutError("no message", timeout=0.5), TimeoutError),
    (errors.WaitCancelledError("cancelled"), RuntimeError),
    (errors.PeerDiedError("gone"), ConnectionError),
    (errors.WriterDiedError("gone"), errors.PeerDiedError),
    (errors.ReaderDiedError("gone", ranks=[3, 1]), errors.PeerDiedError),
    (errors.ReaderEvictedError("too slow"), errors.PeerDiedError),
    (errors.DiscoveryError("refused", url="http://a:1", reason="refused"), ConnectionError),
    (errors.NatsError("no connection"), ConnectionError),
    (errors.NotLiveError(1.0, {Rank("a"): "nothing listens"}), TimeoutError),
    (errors.NoCandidateError(3, {"drained": 3}), LookupError),
    (errors.DuplicateBookingError("r1"), ValueError),
    (errors.UnknownBookingError("r1"), KeyError),
    (errors.InvariantError("a run without owners"), AssertionError),
]


def name(value: object) -> str:
    return type(value).__name__ if isinstance(value, Exception) else ""


def test_every_error_is_tried_here() -> None:
    raised = {kind.__name__ for kind in map(type, (error for error, _ in RAISED))}
    assert raised | {"KVIndexError"} == set(errors.__all__)


@pytest.mark.parametrize(("error", "builtin"), RAISED, ids=name)
def test_it_is_what_a_stranger_would_catch_and_pickles_and_copies_with_its_attributes(
    error: errors.KVIndexError, builtin: type[Exception]
) -> None:
    assert isinstance(error, builtin)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert (str(twin), twin.args, vars(twin)) == (str(error), error.args, vars(error))
        assert getattr(twin, "errno", None) == getattr(error, "errno", None)
