"""Child processes that are started again whenever they end, and the order in which they end."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Final

logger = logging.getLogger(__name__)

_SOON: Final = 1.0  # seconds: what ends sooner is started again later and later
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1


class Child:
    """A process that is started again whenever it ends.

    Its standard input is a pipe of the parent, so that it notices the parent's end.

    Args:
        name: as messages name it.
        command: its command line.
        descriptors: of files that it inherits.
        dies_with_parent: have Linux kill it at the parent's end, since it does not read its input.
        after: waits for what it needs, in a thread of its own; by default it is started at once.
        before: called before each start.

    Owner: the thread that calls `Children.run`; `signal` from any.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        descriptors: tuple[int, ...] = (),
        *,
        dies_with_parent: bool = False,
        after: Callable[[], object] | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self.after = after
        self._before = before
        self._command = command
        self._descriptors = descriptors
        is_linux = sys.platform == "linux"
        self._preexec = _die_with_parent() if dies_with_parent and is_linux else None
        self._began = 0.0
        self._pause = 0.0

    def start(self, ended: Callable[[Child], None]) -> None:
        """Start it; `ended` is called once it has ended, by another thread."""
        self._before()
        self._began = time.monotonic()
        self.process = process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            pass_fds=self._descriptors,
            start_new_session=True,  # Ctrl-C is the parent's
            preexec_fn=self._preexec,
        )

        def wait() -> None:
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
            ended(self)

        threading.Thread(target=wait, name=f"kvindex-{self.name}", daemon=True).start()

    def pause(self) -> float:
        """Return the seconds until it is to be started again."""
        is_soon = time.monotonic() - self._began < _SOON
        self._pause = min(_LONGEST_PAUSE, self._pause * 2 or _FIRST_PAUSE) if is_soon else 0.0
        return self._pause

    def notify(self) -> None:
        """Have the function called that it has given to `from_parent`; soon, if it just starts."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError, ValueError):  # it has ended
                self.process.stdin.write(b"1")
                self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


class Children:
    """Runs processes until `stop`: first those that drain end, then the others.

    Args:
        kept: run until the others have drained.
        draining: receive SIGTERM first, and end in their own time.
        opened: is closed once all have ended.

    Owner: the thread that calls `run`; `stop` and `kill` also from signal handlers.
    """

    def __init__(self, kept: Sequence[Child], draining: Sequence[Child], opened: ExitStack) -> None:
        self._kept = kept
        self._draining = draining
        self._opened = opened
        self._is_ending = False
        # What has ended, and what is due to be started. All starts happen in one thread: Linux
        # takes the end of the thread that has started a process for that of its parent.
        self._news: queue.SimpleQueue[tuple[Child, bool]] = queue.SimpleQueue()

    def run(self) -> None:
        """Run all processes until `stop`, and until those that drain have ended."""
        with self._opened:
            try:
                for child in [*self._kept, *self._draining]:
                    self._begin(child)
                running = len(self._draining)
                while running:
                    child, is_due = self._news.get()
                    if self._is_ending:
                        running -= child in self._draining
                    elif is_due:
                        child.start(self._ended)
                    else:
                        self._start_again(child)
                for child in self._kept:
                    child.signal(signal.SIGTERM)
                    if child.process is not None:
                        child.process.wait()
            finally:
                self.kill()

    def _begin(self, child: Child) -> None:
        after = child.after
        if after is None:
            child.start(self._ended)
            return

        def wait() -> None:
            after()
            self._news.put((child, True))

        threading.Thread(target=wait, name=f"kvindex-{child.name}", daemon=True).start()

    def _ended(self, child: Child) -> None:
        self._news.put((child, False))

    def _start_again(self, child: Child) -> None:
        assert child.process is not None
        pause = child.pause()
        logger.warning(
            "%s ended with %d: it is started again in %g s",
            *(child.name, child.process.returncode, pause),
        )
        timer = threading.Timer(pause, self._news.put, [(child, True)])
        timer.daemon = True
        timer.start()

    def stop(self) -> None:
        """Let the processes that drain do so, then end all."""
        self._is_ending = True
        for child in self._draining:
            child.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all processes at once."""
        for child in [*self._kept, *self._draining]:
            child.signal(signal.SIGKILL)


def from_parent(ended: Callable[[], object], notified: Callable[[], object] = lambda: None) -> None:
    """Call functions, in a thread of their own, as the parent says on standard input.

    Args:
        ended: called once the parent has ended.
        notified: called when the parent calls `Child.notify`.
    """

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            notified()
        ended()

    threading.Thread(target=wait, name="kvindex-parent", daemon=True).start()


def _die_with_parent() -> Callable[[], None]:
    """Return what a child calls before its program begins."""
    prctl = ctypes.CDLL(None).prctl  # loaded here: between fork and exec nothing may be

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return ask
