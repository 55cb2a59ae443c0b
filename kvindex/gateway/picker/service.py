"""The picker over gRPC: its server, health, and the order in which it ends."""

from __future__ import annotations

import asyncio
import datetime
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from envoy.service.accesslog.v3 import als_pb2 as als
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, start_http_server

from kvindex import ConfigurationError
from kvindex.gateway.access import Access, AllCollector
from kvindex.gateway.gateway import Routers
from kvindex.gateway.picker.stream import Picker
from kvindex.gateway.settings import GatewaySettings, PickerSettings
from kvindex.gateway.tokens import Tokenizing
from kvindex.gateway.tracing import new_tracer
from kvindex.gateway.upstream import Upstream
from kvindex.service.http import raise_descriptors

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_MOST_STREAMS: Final = 4_096
_ROOM: Final = 1 << 20  # bytes of a message, beside a body
_LOOK_SECONDS: Final = 0.1  # between looks at whether engines are known
_VALID: Final = datetime.timedelta(days=3650)
_STATUS: Final = health_pb2.HealthCheckResponse


class PickerServer:
    """Serves the endpoint picker's protocol, and gRPC health, until SIGTERM or Ctrl-C.

    Then health answers NOT_SERVING, and the streams of open requests end or are cut after
    `GatewaySettings.drain` seconds.

    Owner: one event loop.
    """

    def __init__(
        self,
        routers: Routers,
        settings: PickerSettings,
        gateway: GatewaySettings,
        engine_token: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.port = self.metrics_port = 0  # where it listens, once it does
        self._routers = routers
        self._settings = settings
        self._drain = gateway.drain
        self._queue_within = gateway.queue_within
        self._tokens_within = gateway.tokens_within
        self._tenant_header = gateway.tenant_header
        self._explains = gateway.explain_headers
        self._engine_token = engine_token
        self._health = Health(lambda: routers.routing.is_ready)
        self._credentials = None if settings.is_plain else _credentials(settings.tls)

    async def serve(self, on_listening: Callable[[], None] = lambda: None) -> None:
        """Serve until a signal."""
        raise_descriptors()
        ending = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ending.set)
        upstream = Upstream(self._engine_token)
        tokenizing = Tokenizing(upstream, self._tokens_within)
        picker = Picker(
            self._routers.routing,
            tokenizing,
            most_bytes=self._settings.body_bytes,
            queue_within=self._queue_within,
            access=Access(self._tenant_header, new_tracer()),
            most_endpoints=self._settings.endpoints,
            explains=self._explains,
            is_conformance=self._settings.is_conformance,
        )
        server = new_server(picker, self._health, self._settings.body_bytes)
        host = self._settings.host
        address = f"[{host}]" if ":" in host else host
        address = f"{address}:{self._settings.port}"
        try:
            if self._credentials is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise ConfigurationError(f"cannot listen at {address}: {error}") from None
        await server.start()

        async def statistics() -> dict[str, Any]:
            own = {**picker.access.statistics(), "refused": {}}
            own["token_failures"] = tokenizing.statistics()["failures"]
            own["engine_failures"] = upstream.statistics()["failures"]
            return self._routers.statistics(own)

        # The counters are the loop's, and Prometheus asks from threads.
        with self._metrics(lambda: asyncio.run_coroutine_threadsafe(statistics(), loop).result()):
            on_listening()
            await ending.wait()
            # First the health: gateways send no more streams while the open ones end.
            self._health.is_ending = True
            await server.stop(self._drain)
        await upstream.close()

    @contextmanager
    def _metrics(self, read: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """Serve the metrics in threads of their own, which read them on the event loop."""
        if self._settings.metrics_port is None:
            yield
            return
        registry, routers = CollectorRegistry(), self._routers
        models = routers.models
        registry.register(
            AllCollector(
                routers.source, lambda: list(models.routers.values()), read, models.name_of
            )
        )
        port, host = self._settings.metrics_port, self._settings.metrics_host or self._settings.host
        try:
            server, thread = start_http_server(port, host, registry)
            server.set_app(self._application(server.get_app()))
        except OSError as error:
            raise ConfigurationError(f"cannot listen at {host}:{port}: {error}") from error
        self.metrics_port = server.server_port
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def _application(self, metrics: Any) -> Any:
        # Prometheus' own application answers every path with the metrics: probes would be wrong.

        def answer(environ: Any, start_response: Any) -> Any:
            path = environ["PATH_INFO"]
            if path == "/metrics":
                return metrics(environ, start_response)
            statuses = {"/health": "200 OK", "/ready": "503 Service Unavailable"}
            if self._health.is_ready():
                statuses["/ready"] = "200 OK"
            status = statuses.get(path, "404 Not Found")
            start_response(status, [("Content-Type", "text/plain")])
            return [f"{status[4:]}\n".encode()]

        return answer


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1: "liveness" always; "readiness", "" and the service once engines are known.

    Owner: one event loop.
    """

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self.is_ending = False  # the picker ends: then it is not ready
        self._is_ready = is_ready

    def is_ready(self) -> bool:
        """Return whether engines are known, and the picker does not end."""
        return self._is_ready() and not self.is_ending

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return the status of a service; NOT_FOUND for another one."""
        status = self._status(request.service)
        if status == _STATUS.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:100]!r}")
        return _STATUS(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Yield the status whenever it changes."""
        last = None
        while True:
            status = self._status(request.service)
            if status != last:
                last = status
                yield _STATUS(status=status)
            await asyncio.sleep(_LOOK_SECONDS)  # nothing announces that engines come and go

    def _status(self, service: str) -> int:
        if service == "liveness":
            return int(_STATUS.SERVING)
        if service not in ("", "readiness", SERVICE):
            return int(_STATUS.SERVICE_UNKNOWN)
        return int(_STATUS.SERVING if self.is_ready() else _STATUS.NOT_SERVING)


def new_server(picker: Picker, health: Health, body_bytes: int) -> Any:
    """Return a gRPC server with the picker's services; it does not listen yet."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_concurrent_streams", _MOST_STREAMS),
            ("grpc.max_receive_message_length", body_bytes + _ROOM),
            ("grpc.so_reuseport", 0),  # a second picker at this port is an error
        ]
    )

    async def process(requests: AsyncIterator[Any], _: Any) -> AsyncIterator[Any]:
        async for answer in picker.process(requests):  # gRPC wants a generator function
            yield answer

    picking = grpc.stream_stream_rpc_method_handler(
        process,
        ext_proc.ProcessingRequest.FromString,
        ext_proc.ProcessingResponse.SerializeToString,
    )
    handlers = [grpc.method_handlers_generic_handler(SERVICE, {"Process": picking})]
    reports = picker.reports
    if reports is not None:

        async def read(messages: AsyncIterator[Any], _: Any) -> Any:
            async for message in messages:
                for entry in message.http_logs.log_entry:
                    reports.logged(entry)
            return als.StreamAccessLogsResponse()

        logging = grpc.stream_unary_rpc_method_handler(
            read,
            als.StreamAccessLogsMessage.FromString,
            als.StreamAccessLogsResponse.SerializeToString,
        )
        name = "envoy.service.accesslog.v3.AccessLogService"
        service = {"StreamAccessLogs": logging}
        handlers.append(grpc.method_handlers_generic_handler(name, service))
    server.add_generic_rpc_handlers(handlers)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return server


def _credentials(files: tuple[str, str] | None) -> Any:
    if files is not None:
        try:
            chain, own_key = (Path(file).read_bytes() for file in files)
        except OSError as error:
            raise ConfigurationError(f"the certificate cannot be read: {error}") from error
        return grpc.ssl_server_credentials([(own_key, chain)])
    # The protocol wants TLS, and gateways accept any certificate: nobody has to make one.
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvindex epp")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks differ: a certificate of the future would be refused.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pair = key.private_bytes(pem, form, plain), certificate.public_bytes(pem)
    return grpc.ssl_server_credentials([pair])
