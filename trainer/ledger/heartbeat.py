"""Renewal of a lease while a step runs.

In: a lease. Out: renewals, from a thread of its own. Invariant: the thread decides nothing. The commit decides whether a step counts; a
lease that is lost, or cannot be renewed, is logged as soon as that is detected.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager

from spangrad.errors import LedgerError
from spangrad.leases import BEATS
from trainer.ledger.ledger import BatchLease, Ledger

logger = logging.getLogger(__name__)


@contextmanager
def beating(ledger: Ledger, lease: BatchLease) -> Generator[None]:
    """Renew a lease until the block ends, or the lease is lost."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(ledger.lease_seconds / BEATS):
            try:
                if not ledger.renew(lease):
                    logger.warning("the lease of version %d is lost: its step will not be committed", lease.version)
                    return
            except LedgerError as error:
                logger.warning("the lease of version %d could not be renewed: %s", lease.version, error)

    thread = threading.Thread(target=beat, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
