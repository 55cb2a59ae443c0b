"""A pool on NATS: its servers and names, and how a connection to it is made.

A *pool* is a group of engines whose events one relay writes to NATS: the name is part of every name
that kvindex uses there, so several pools share a server.

| name | what it is |
|---|---|
| stream `KVINDEX_<pool>` | the log: messages of the subjects `kvindex.<pool>.log.<epoch>` |
| bucket `KVINDEX_<pool>_snapshots` | an object store with the newest snapshots |
| subject `kvindex.<pool>.load` | core NATS: what gateways have booked |

nats-py, of the extra `kvindex[nats]`, is imported only where a connection is made.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import msgspec

from kvindex.wire.errors import ConfigurationError, NatsError, how_to_install
from kvindex.wire.forks import disown_in_children

if TYPE_CHECKING:
    from nats.aio.client import Client as NatsClient

_POOL = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HOST = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")
_PORT = 4222
_PING_SECONDS, _PINGS = 2, 2  # so a stopped server is noticed within 4 to 6 s
_CONNECT_SECONDS = 2
_RETRY_SECONDS = 0.1
_AWAKE_SECONDS = 0.25  # of a wait that a process which is stopped meanwhile loses, at most
_PENDING_BYTES = 64 << 20  # that wait to be written to a connection

_Result = TypeVar("_Result")


class NatsOptions(TypedDict, total=False):
    """How a connection to NATS is secured; all are optional.

    Attributes:
        user, password: of the account.
        token: instead of these.
        nkey_file: instead of these, a file with an nkey seed.
        credentials_file: instead of these, a file with a JWT and its nkey.
        tls_ca_file: certificates of authorities that servers are checked against; the system's by
            default. With any `tls_…` option or a tls:// URL, the connection is encrypted or
            fails. The handshake comes first, so servers need `handshake_first` in their TLS
            settings (nats-server 2.10.4): with the other order nats-py would go on in plain text
            if the server, or somebody in between, offers no TLS.
        tls_cert_file, tls_key_file: this client's certificate and its key.
    """

    user: str
    password: str
    token: str
    nkey_file: str
    credentials_file: str
    tls_ca_file: str
    tls_cert_file: str
    tls_key_file: str


class NatsPool(msgspec.Struct, frozen=True):
    """A pool's servers and names; `repr` and `str` leave the options out, which have passwords."""

    servers: tuple[str, ...]  # their URLs, each with a port
    name: str
    options: NatsOptions

    @property
    def stream(self) -> str:
        """The stream that holds the log."""
        return f"KVINDEX_{self.name}"

    @property
    def log_prefix(self) -> str:
        """What the subject of an epoch begins with; the epoch follows."""
        return f"kvindex.{self.name}.log."

    @property
    def log_subjects(self) -> str:
        """The subjects of all epochs."""
        return f"{self.log_prefix}*"

    @property
    def bucket(self) -> str:
        """The object store that holds the snapshots."""
        return f"KVINDEX_{self.name}_snapshots"

    @property
    def load_subject(self) -> str:
        """The subject on which gateways share their load."""
        return f"kvindex.{self.name}.load"

    @property
    def is_encrypted(self) -> bool:
        """Whether connections use TLS."""
        wanted = any(name.startswith("tls_") for name in self.options)
        return wanted or any(server.startswith("tls:") for server in self.servers)

    def __str__(self) -> str:
        scheme, _, _ = self.servers[0].partition("://")
        return f"{scheme}://{','.join(s.partition('://')[2] for s in self.servers)}/{self.name}"

    def __repr__(self) -> str:
        return f"NatsPool({str(self)!r})"


def parse_pool(url: str, pool: str | None, options: NatsOptions) -> NatsPool:
    """Return the pool that a URL and a name stand for; raises ConfigurationError.

    Examples:
        >>> parse_pool("nats://n1,n2:4223/llama", None, {}).servers
        ('nats://n1:4222', 'nats://n2:4223')
    """
    # Before all else, so that no other refusal shows it either.
    if "@" in url:
        raise ConfigurationError(
            "a password in a URL is shown in logs and lists of processes: pass user= and password=,"
            " or credentials_file="
        )
    scheme, separator, rest = url.partition("://")
    hosts, _, path = rest.partition("/")
    if separator != "://" or scheme not in ("nats", "tls") or not hosts:
        raise ConfigurationError(
            f"{url!r} is no URL of NATS: expected nats://HOST[:PORT][,HOST…][/POOL], or tls://"
        )
    if path and pool and path != pool:
        raise ConfigurationError(f"the URL names the pool {path!r}, pool= names {pool!r}")
    name = path or pool or ""
    if not _POOL.fullmatch(name):
        raise ConfigurationError(
            f"the pool {name!r:.100} has no name that NATS allows: use 1 to 64 letters, digits, "
            '"_" and "-"'
            if name
            else f"no pool is named: write {url.rstrip('/')}/POOL, or pass pool="
        )
    servers = []
    for host in hosts.split(","):
        parts = _HOST.fullmatch(host)
        port = int(parts[2] or _PORT) if parts else 0
        if parts is None or not 0 < port < 1 << 16:
            raise ConfigurationError(f"{url!r}: {host!r} is no HOST[:PORT]")
        servers.append(f"{scheme}://{parts[1]}:{port}")
    _check_options(options)
    return NatsPool(tuple(servers), name, options)


def _check_options(options: NatsOptions) -> None:
    unknown = options.keys() - NatsOptions.__annotations__.keys()
    if unknown:
        raise ConfigurationError(f"{sorted(unknown)[0]!r} is no option of a connection to NATS")
    for name, value in options.items():
        if not isinstance(value, str) or not value:
            raise ConfigurationError(f"{name} must be text, not {value!r:.100}")
        # Whether it can be opened: a wrong path is to be refused here, not by the thread that
        # connects. What is in it is read, and checked, at each connection.
        if name.endswith("_file"):
            _read(name, value, 0)
    ways = [n for n in ("user", "token", "nkey_file", "credentials_file") if n in options]
    if len(ways) > 1:
        raise ConfigurationError(f"{ways[0]} and {ways[1]} exclude each other")
    for one, other in (("user", "password"), ("tls_cert_file", "tls_key_file")):
        if (one in options) != (other in options):
            raise ConfigurationError(f"{one} and {other} belong together")


def require_nats() -> None:
    """Raise ConfigurationError if nats-py is not installed."""
    try:
        import nats  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            f"the package nats-py is missing: {how_to_install('nats')}"
        ) from None


def check_files(pool: NatsPool) -> None:
    """Raise ConfigurationError if nats-py is missing, or a file of the options cannot be used."""
    require_nats()
    _connect_options(pool)


async def open_connection(
    pool: NatsPool,
    name: str,
    *,
    timeout: float = 5.0,
    no_echo: bool = False,
    on_change: Callable[[str], None] = lambda trouble: None,
) -> NatsClient:
    """Return a connection to a server of a pool, which reconnects by itself for ever.

    A server must accept it within `timeout` seconds. `on_change` is called on the event loop with
    what is wrong, and with "" when connected again.

    ConfigurationError: nats-py is missing, or a file of the options cannot be used. NatsError: no
    server accepted it in time; the message has the last reason.
    """
    require_nats()
    from nats.aio.client import Client as NatsClient

    from kvindex.wire.nats_transport import PromptTransport

    last = ""

    async def note(error: Exception) -> None:
        nonlocal last
        # The server had said why before it hung up.
        if last and isinstance(error, ConnectionResetError):
            return
        last = _explained(pool, error)
        on_change(last)

    async def disconnected() -> None:
        on_change("disconnected")

    async def reconnected() -> None:
        nonlocal last
        last = ""
        on_change("")

    client = NatsClient()
    # nats-py makes one of its own only if there is none, and has no option for it.
    client._transport = PromptTransport()
    options = _connect_options(pool)
    try:
        # With a time-out of its own: nats-py tries servers for ever from the first attempt on.
        await run_apart(
            client.connect(
                servers=list(pool.servers),
                name=name,
                error_cb=note,
                disconnected_cb=disconnected,
                reconnected_cb=reconnected,
                connect_timeout=_CONNECT_SECONDS,
                reconnect_time_wait=_RETRY_SECONDS,  # type: ignore[arg-type]  # it may be a float
                max_reconnect_attempts=-1,
                ping_interval=_PING_SECONDS,
                max_outstanding_pings=_PINGS,
                pending_size=_PENDING_BYTES,
                no_echo=no_echo,
                **options,
            ),
            timeout,
        )
    except BaseException as error:
        with suppress(Exception):
            await client.close()
        if not isinstance(error, Exception):
            raise
        is_late = isinstance(error, asyncio.TimeoutError)
        reason = last or "no answer" if is_late else _explained(pool, error)
        raise NatsError(f"no connection to {pool} in {timeout:g} s: {reason}") from error
    return client


def _connect_options(pool: NatsPool) -> dict[str, Any]:
    """Return the options of `nats.connect` that secure a connection."""
    secured = pool.options
    options: dict[str, Any] = {
        name: secured[name] for name in ("user", "password", "token") if name in secured
    }
    # A file of another kind is refused here: nats-py reads it for ever, or when it connects again.
    for name, option, parts in (
        ("nkey_file", "nkeys_seed", (b"SU",)),
        (
            "credentials_file",
            "user_credentials",
            (b"-BEGIN NATS USER JWT-", b"-BEGIN USER NKEY SEED-"),
        ),
    ):
        if name in secured:
            path = options[option] = secured[name]  # type: ignore[literal-required]
            content = _read(name, path)
            for part in parts:
                if part not in content:
                    raise ConfigurationError(
                        f"{name}: {path} has no key: no {part.decode()!r} is in it"
                    )
    if pool.is_encrypted:
        try:
            context = ssl.create_default_context(cafile=secured.get("tls_ca_file"))
            if "tls_cert_file" in secured:
                context.load_cert_chain(secured["tls_cert_file"], secured["tls_key_file"])
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(f"the TLS files cannot be used: {error}") from error
        options.update(tls=context, tls_handshake_first=True)
    return options


def _read(name: str, path: str, size: int = -1) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError as error:
        raise ConfigurationError(f"{name}: {path} cannot be read: {error.strerror}") from None


def _explained(pool: NatsPool, error: Exception) -> str:
    """Return an error of nats-py, and what to do about it."""
    text = f"{type(error).__name__}: {error}".strip(": ")
    # With the other order the greeting comes before the handshake, and is waited for after it.
    is_late = pool.is_encrypted and isinstance(error, asyncio.TimeoutError)
    if is_late or (isinstance(error, ssl.SSLError) and "WRONG_VERSION" in text.upper()):
        return f"{text}; does the server's TLS have handshake_first? Without it, kvindex refuses it"
    if "authorization" in text.lower() or "permissions violation" in text.lower():
        return f"{text}; check user, token, nkey or credentials, and their rights"
    return text


async def run_apart(call: Awaitable[_Result], timeout: float | None = None) -> _Result:
    """Return what a call returns, in a task of its own, so that the caller can be cancelled.

    asyncio.TimeoutError: it did not end in so many seconds; it is cancelled.
    """
    # nats-py ignores a cancellation while it flushes, and `asyncio.wait_for` before Python 3.12 if
    # what it waits for ends at that moment: the caller would go on.
    task = asyncio.ensure_future(call)
    # After a time-out nobody asks for its error, and asyncio would log that.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        if timeout is None:
            await asyncio.wait([task])
        left = timeout or 0.0
        while not task.done():
            if left <= 0:
                raise asyncio.TimeoutError
            # In steps: the seconds for which this process is stopped are not to count.
            step = min(left, _AWAKE_SECONDS)
            await asyncio.wait([task], timeout=step)
            left -= step
        return task.result()
    finally:
        task.cancel()


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop for nats-py: uvloop's if it is installed, at two thirds of the CPU."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop()
    return new_event_loop()


class NatsThread:
    """A thread with an event loop that runs one coroutine, `main()`, until `close`.

    `on_failure` is called on the thread if it ends with an error. Thread safety: every method may
    be called from any thread. In a forked child there is no thread: `close` does nothing there.
    """

    def __init__(
        self,
        name: str,
        main: Callable[[], Coroutine[Any, Any, None]],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._main = main
        self._on_failure = on_failure
        self._loop = new_loop()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._is_forked = False
        disown_in_children(self, NatsThread._disown)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function on the loop, soon; not at all once the thread has ended."""
        if not self._is_forked:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(function)

    def request_stop(self) -> None:
        """Ask the thread to end; this waits for no lock, so finalizers may call it."""
        self._closing = True
        self.call_soon(self._cancel)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self.request_stop()
        if not self._is_forked and self._thread is not threading.current_thread():
            self._thread.join()

    def _cancel(self) -> None:
        # Once: a second time would interrupt what the coroutine does to end.
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._supervise())
        except BaseException as error:
            self._on_failure(error)
        finally:
            self._loop.close()

    async def _supervise(self) -> None:
        task = self._task = asyncio.ensure_future(self._main())
        if self._closing:  # asked before there was a task to cancel
            self._cancel()
        try:
            await task
        except asyncio.CancelledError:
            if not self._closing:
                raise
        finally:
            # Of nats-py's own; they would be destroyed with the loop, and complain.
            rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

    def _disown(self) -> None:
        self._is_forked = True
