"""Which engines serve a model, how a rank is pinned, and which rank a request gets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from kvindex import Index, Rank, UnknownRankError
from kvindex.gateway.calls import CallError
from kvindex.gateway.routing import (
    Models,
    NoRankError,
    Pin,
    Reservation,
    Routing,
    Serving,
    UnknownModelError,
    pin,
)
from kvindex.gateway.waiting import ShedError
from kvindex.routing import Capacity, Router
from kvindex.subscribe import PublisherAddress
from kvindex.subscribe.discovery import EngineReport
from tests.routing.fleet import BLOCK, PROMPT, hold

pytestmark = pytest.mark.unit

PATIENCE = 300.0
HEADER = b"x-data-parallel-rank"


def report(name: str, *models: str, ranks: int = 1, first: int = 0, **fields: Any) -> EngineReport:
    addresses = tuple(
        PublisherAddress(first + rank, f"tcp://{name}:{5557 + rank}", None) for rank in range(ranks)
    )
    return EngineReport(f"http://{name}", "vllm", "0.33.0", models, ranks=addresses, **fields)


class Fleet:
    """Engines and their index, as a client shows them."""

    def __init__(self, **options: Any) -> None:
        self.index = Index()
        self.engines: Mapping[str, EngineReport] = {}
        self.live: frozenset[Rank] = frozenset()
        self.options = options
        self.models = Models(self, lambda: self.engines, self.router)
        self.routing = Routing(self.models, most_waiting=2)

    def router(self, model: str) -> Router:
        return Router(self, model=model, **self.options)

    def set(self, **engines: EngineReport) -> None:
        self.engines = engines
        for name, each in engines.items():
            for address in each.ranks:
                self.index.add(Rank(name, address.dp_rank))
        self.live = frozenset(self.index.ranks)

    def check_open(self) -> None:
        pass

    def live_ranks(self) -> frozenset[Rank]:
        return self.live

    def connected_ranks(self) -> frozenset[Rank]:
        return self.live

    async def reserve(
        self, model: str = "m", token_ids: Any = PROMPT, **options: Any
    ) -> Reservation:
        self.numbers = getattr(self, "numbers", 0) + 1
        details: dict[str, Any] = {"salt": None, "reads_cache": True}
        details |= {"exclude": [], "prompt_tokens": 100 if token_ids is None else len(token_ids)}
        deadline = asyncio.get_running_loop().time() + options.pop("within", PATIENCE)
        return await self.routing.reserve(
            model,
            token_ids,
            request_id=str(self.numbers),
            deadline=deadline,
            **{**details, **options},
        )


@pytest.mark.parametrize(
    ("serving", "rank", "pinned"),
    [
        (Serving("a", "u", "vllm", "0.33.0"), 0, Pin()),
        (Serving("a", "u", "vllm", "0.33.0", ranks=2), 1, Pin(((HEADER, b"1"),))),
        (Serving("a", "u", "vllm", "0.33.0", first_rank=4, ranks=2), 5, Pin(((HEADER, b"1"),))),
        (Serving("a", "u", "", "", ranks=2), 1, Pin(((HEADER, b"1"),))),
        (Serving("a", "u", "sglang", "0.5.23", ranks=2), 1, Pin(((HEADER, b"1"),))),
        (Serving("a", "u", "sglang", "0.5.10rc0", ranks=2), 1, Pin(((HEADER, b"1"),))),
        (Serving("a", "u", "sglang", "?", ranks=2), 1, Pin(((HEADER, b"1"),))),
        (
            Serving("a", "u", "sglang", "0.5.9", ranks=2),
            1,
            Pin(body_fields={"data_parallel_rank": 1}),
        ),
    ],
)
def test_a_rank_is_pinned_as_its_engine_reads_it(serving: Serving, rank: int, pinned: Pin) -> None:
    assert pin(serving, Rank("a", rank)) == pinned


async def test_a_request_that_a_proxy_has_sent_elsewhere_is_that_engines() -> None:
    fleet = Fleet()
    fleet.set(a=report("a", "m"), b=report("b", "m"))
    reservation = await fleet.reserve()
    before = reservation.serving
    (other,) = [each for each in fleet.models.servings().values() if each != before]
    reservation.move(other)
    assert (reservation.rank.worker, reservation.serving) == (other.worker, other)


def test_two_threads_that_see_a_new_model_make_one_router_of_it() -> None:
    fleet = Fleet()
    made: list[Router] = []

    def make_router(model: str) -> Router:
        if not made:
            second.start()
            second.join(0.2)  # it would make another one at once
        made.append(fleet.router(model))
        return made[-1]

    models = Models(fleet, lambda: fleet.engines, make_router)
    second = threading.Thread(target=models.servings)
    fleet.set(a=report("a", "m"))
    assert models.find("m").router is made[0]
    second.join()
    assert len(made) == 1


def test_models_and_adapters_are_those_of_the_engines_that_are_there() -> None:
    fleet = Fleet()
    with pytest.raises(UnknownModelError, match="served: none"):
        fleet.models.find("m")
    fleet.set(
        a=report("a", "m", "alias"),
        b=report("b", "m", "sql", adapters=("sql",)),
        c=report("c", "n"),
    )
    assert sorted(fleet.models.names()) == ["alias", "m", "n", "sql"]
    model, alias, adapter = map(fleet.models.find, ("m", "alias", "sql"))
    assert model.router is alias.router is adapter.router is not fleet.models.find("n").router
    assert model.ranks == (Rank("a"), Rank("b"))
    assert (alias.ranks, adapter.ranks, adapter.lora) == ((Rank("a"),), (Rank("b"),), "sql")
    with pytest.raises(UnknownModelError, match="'z'; served: alias, m, n, sql"):
        fleet.models.find("z")
    with pytest.raises(UnknownModelError, match=r"^name a model; served: alias, m, n, sql"):
        fleet.models.find("")  # which of two?
    router = model.router
    fleet.set(b=report("b", "m"))
    assert fleet.models.find("m").router is router, "its load is kept"
    assert fleet.models.find("m").ranks == (Rank("b"),), "a is subscribed to, but no engine"


def test_an_adapter_gets_no_requests_for_another_engines_model_of_its_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet()
    engines = {
        "a": report("a", "qwen", "llama", "sql", adapters=("llama", "sql")),
        "b": report("b", "llama", "sql", adapters=("sql",)),
        "c": report("c", "llama"),
    }
    for _ in range(2):
        fleet.set(**engines)
        llama, sql = fleet.models.find("llama"), fleet.models.find("sql")
        assert ([s.worker for s in llama.servings], llama.lora) == (["b", "c"], None)
        assert ([s.worker for s in sql.servings], sql.lora) == (["a"], "sql")
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 2, "once for each"
    assert "a serves something else by the name llama than b" in logged[0]
    del engines["b"], engines["c"]
    fleet.set(**engines)
    assert fleet.models.find("llama").lora == "llama"


async def test_an_engine_that_is_away_gets_no_requests_and_one_that_answers_makes_it_ready() -> (
    None
):
    fleet = Fleet()
    assert not fleet.routing.is_ready
    fleet.set(a=report("a", "m", away="asleep"), b=report("b", "m"))
    for _ in range(3):
        assert (await fleet.reserve()).rank == Rank("b")
    assert fleet.routing.is_ready
    fleet.set(a=report("a", "m", away="asleep"), b=report("b", "m", is_silent=True))
    assert not fleet.routing.is_ready
    fleet.set(a=report("a", "m", away="asleep"))
    with pytest.raises(NoRankError):
        await fleet.reserve()
    fleet.set(a=report("a", "m"))
    assert (await fleet.reserve()).rank == Rank("a")
    fleet.routing.drain("a")
    assert not fleet.routing.is_ready


async def test_an_engine_that_counts_all_ranks_is_noticed_by_its_refusal() -> None:
    fleet = Fleet()
    fleet.set(a=report("a", "m", ranks=4, first=4))

    async def sent() -> tuple[Reservation, bytes]:
        reservation = await fleet.reserve()
        ((_, number),) = reservation.pin.headers
        reservation.cancel()
        return reservation, number

    reservation, number = await sent()
    another, _ = await sent()
    assert int(number) < 4
    assert not reservation.is_misnumbered(b'{"error":{"message":"temperature"}}', b"{}")
    refusal = b'{"error":{"message":"DP ranks here are 4 to 7"}}'
    for body in (b'{"n":"no such rank"}', b'{"n":"r\\u0061nk"}', b" " * (1 << 17)):
        assert not reservation.is_misnumbered(refusal, body), "it may be the body's"
    assert (await sent())[1] < b"4"
    assert reservation.is_misnumbered(refusal, b"{}")
    assert another.is_misnumbered(refusal, b"{}"), "it was sent before that was known"
    reservation, number = await sent()
    assert int(number) >= 4
    assert reservation.is_misnumbered(b"no such rank", b"{}"), "it was about something else"
    assert (await sent())[1] < b"4"


async def test_a_prompt_goes_where_its_image_went_unless_that_rank_is_busy() -> None:
    fleet = Fleet()
    fleet.set(**{name: report(name, "m") for name in "abcd"})

    async def place(media: bytes, **options: Any) -> Reservation:
        return await fleet.reserve(token_ids=None, media=media, **options)

    homes = {}
    for number in range(12):
        image = b"%d" % number
        reservation = await place(image)
        homes[image] = reservation.rank
        reservation.cancel()
    for image, home in homes.items():
        reservation = await place(image)
        assert reservation.rank == home
        reservation.cancel()
    image, home = next(iter(homes.items()))
    assert (await place(image, exclude=[home])).rank != home
    placed = [(await place(image)).rank for _ in range(40)]
    assert len(set(placed)) > 1, "it is one image, but others have nothing to do"
    fleet.set(**{name: report(name, "m") for name in "abcd" if name != home.worker})
    assert (await place(b"5")).rank.worker in "abcd"


async def test_the_maker_of_a_response_may_be_reported_after_it_is_asked_for() -> None:
    fleet = Fleet()
    fleet.set(a=report("a", "m"), b=report("b", "m"))
    routing = fleet.routing
    assert await routing.maker("resp_1") is None
    routing.made_within = PATIENCE
    many = [asyncio.ensure_future(routing.maker(f"made-up-{number}")) for number in range(2000)]
    await asyncio.sleep(0)
    assert sum(task.done() for task in many) > 900, "so many do not wait"
    for task in many:
        task.cancel()
    await asyncio.gather(*many, return_exceptions=True)
    asked = asyncio.ensure_future(routing.maker("resp_1"))
    await asyncio.sleep(0)
    routing.note_made("resp_2", "a")
    await asyncio.sleep(0)
    routing.note_made("resp_1", "b")
    serving = await asked
    assert serving is not None
    assert serving.worker == "b"
    routing.made_within = 1e-6
    assert await routing.maker("resp_3") is None


def test_an_engine_that_serves_for_want_of_others_is_not_told_as_left_out() -> None:
    fleet = Fleet()
    fleet.set(a=report("a", "m"), b=report("b", "m"), c=report("c", "other"), d=report("d", "m"))
    routing = fleet.routing
    for worker in ("c", "a"):
        routing.ejection.failed(worker, is_down=True)
    assert set(routing.ejected()["ejected"]) == {"a"}, "the other model has no other engine"
    for worker in ("b", "d"):
        routing.drain(worker)
    assert not routing.ejected()["ejected"]


async def test_a_gateway_without_descriptors_leaves_out_no_engine() -> None:
    fleet = Fleet()
    fleet.set(a=report("a", "m"), b=report("b", "m"))
    reservation = await fleet.reserve()
    for _ in range(3):
        reservation.failed("no_descriptor")
    assert not fleet.routing.ejected()["ejected"]
    assert not fleet.routing.statistics()["ejections"]
    reservation.failed("unreachable")
    assert set(fleet.routing.ejected()["ejected"]) == {reservation.rank.worker}


def test_the_only_model_needs_no_name() -> None:
    fleet = Fleet()
    fleet.set(a=report("a", "m", "sql", adapters=("sql",)))
    assert fleet.models.find("").name == "m"


def test_an_adapter_is_also_named_behind_its_model() -> None:
    fleet = Fleet()
    fleet.set(a=report("a", "m:7b", "sql", adapters=("sql",)))
    assert fleet.models.find("m:7b:sql").lora == "sql"
    assert fleet.models.find("m:7b").lora is None
    for name in ("m:7b:other", "other:sql", "sql:m:7b"):
        with pytest.raises(UnknownModelError):
            fleet.models.find(name)


async def test_a_request_gets_the_rank_that_holds_its_prompt() -> None:
    fleet = Fleet()
    fleet.set(a=report("a", "m", ranks=2), b=report("b", "m"))
    hold(fleet.index, Rank("a", 1), 4)
    reservation = await fleet.reserve()
    assert (reservation.rank, reservation.reason, reservation.held) == (
        Rank("a", 1),
        "cache",
        4 * BLOCK,
    )
    assert (reservation.serving.url, reservation.pin.headers) == ("http://a", ((HEADER, b"1"),))
    again = await fleet.reserve(exclude=[reservation.rank, Rank("gone")])
    assert (again.rank != reservation.rank, again.reason) == (True, "load")
    unknown = await fleet.reserve(token_ids=None)
    assert (unknown.reason, unknown.prompt_tokens) == ("no_tokens", 100)
    reservation.first_token()
    reservation.touch(5)
    reservation.touch(5)
    for each in (reservation, again, unknown):
        each.finish(None, counts=True)
        each.cancel()
    bookings = fleet.routing.statistics()["routers"]["m"]["bookings"]
    assert (bookings["open"], bookings["finished"], bookings["cancelled"]) == (0, 3, 0)


async def test_a_request_that_can_go_nowhere_is_refused_with_the_reasons() -> None:
    fleet = Fleet()
    fleet.set(a=report("a", "m"))
    with pytest.raises(NoRankError, match="1 excluded"):
        await fleet.reserve(exclude=[Rank("a")])
    fleet.routing.drain("a")
    with pytest.raises(NoRankError, match="1 drained"):
        await fleet.reserve()
    fleet.routing.undrain("a")
    with pytest.raises(UnknownRankError):
        fleet.routing.drain("z")
    hold(fleet.index, Rank("a"), 4)
    with pytest.raises(CallError, match="token"):
        await fleet.reserve(token_ids=["text"] * len(PROMPT))
    (await fleet.reserve()).cancel()


async def test_requests_wait_in_order_and_each_end_lets_the_next_one_go() -> None:
    fleet = Fleet(filters=[Capacity(open_requests=1)])
    fleet.set(a=report("a", "m"))
    first = await fleet.reserve()
    second, third = (asyncio.ensure_future(fleet.reserve()) for _ in range(2))
    await asyncio.sleep(0)
    assert fleet.routing.statistics()["waiting"]["m"]["waiting"] == 2
    with pytest.raises(ShedError) as caught:
        await fleet.reserve()
    assert caught.value.reason == "full"
    first.finish(None, counts=True)
    reservation = await second
    assert not third.done()
    reservation.cancel()
    (await third).finish(None, counts=True)
    shed = {"full": 1, "deadline": 0}
    assert fleet.routing.statistics()["waiting"]["m"] == {"waiting": 0, "waited": 2, "shed": shed}


async def test_a_request_that_waits_too_long_or_leaves_holds_up_nobody() -> None:
    fleet = Fleet(filters=[Capacity(open_requests=1)])
    fleet.set(a=report("a", "m"))
    first = await fleet.reserve()
    with pytest.raises(ShedError) as caught:
        await fleet.reserve(within=0.01)
    assert (caught.value.reason, caught.value.retry_after) == ("deadline", 1.0)
    leaving, waiting = (asyncio.ensure_future(fleet.reserve()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    first.finish(None, counts=True)
    (await waiting).cancel()
    assert fleet.routing.statistics()["routers"]["m"]["bookings"]["open"] == 0
