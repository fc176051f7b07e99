"""A training run: the trainer with its parts, made of the settings, from the first look to the end.

In: the settings. Out: policy versions. Invariant: PyTorch and verl are imported once the settings, the store and the ledger are sound;
whatever ends the run, all parts are closed.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing

from spangrad.selection import expression
from spangrad.settings import Settings
from spangrad.store.arrivals import Arrivals, Topic
from spangrad.store.clickhouse import connect
from trainer.credit.learning import check
from trainer.data.planning import plan_of
from trainer.data.source import GroupReader
from trainer.ledger.mirror import Mirror
from trainer.ledger.recovery import newest_version, open_ledger, prepare, require_beginning, running_trainer
from trainer.ledger.store_retries import retry_transactions, retrying_client
from trainer.ledger.tables import LedgerVersion
from trainer.loop import Trainer
from trainer.monitor.batch_times import batch_times
from trainer.monitor.evaluate import Evaluation
from trainer.monitor.watchers import watchers_of
from trainer.phases import check as check_phases
from trainer.publish.publisher import publisher_of
from trainer.restoring import restore
from trainer.retries import Outage
from trainer.shutdown import Shutdown, Stopped

logger = logging.getLogger(__name__)


def train(settings: Settings, *, follow: bool) -> None:
    """Train until there is no whole batch (or, with `follow`, until trainer.max_steps or a signal).

    Args:
        settings: the whole tree; the trainer reads its own section, the store's, the gateway's and the builder's specification.
        follow: wait for groups as they finish.

    Raises:
        SpangradError: a setting, the store, the gateway, a checkpoint or a batch is not as it must be; the ledger is left so that the
            next call goes on.
    """
    check(settings.trainer)
    check_phases(settings.trainer)
    expression(settings.trainer.selection, "trainer.selection")
    shutdown = Shutdown()
    try:
        with shutdown.listening():
            _train(settings, follow, shutdown)
    except Stopped:
        logger.info("stopped by %s", shutdown.requested)


def _train(settings: Settings, follow: bool, shutdown: Shutdown) -> None:
    require_beginning(settings)
    with ExitStack() as parts:
        # Two clients: groups are read while what follows the last step is written. What a builder read is in the tables.
        store, reader = (parts.enter_context(closing(connect(settings.store, consistent=True, settled=follow))) for _ in range(2))
        outage = Outage("the span store")
        client, of_groups = (retrying_client(each, outage, shutdown) for each in (store, reader))
        ledger = parts.enter_context(closing(open_ledger(settings)))
        retry_transactions(ledger, Outage("the ledger's database"), shutdown)
        prepare(ledger, settings)
        newest = parts.enter_context(running_trainer(ledger, settings))

        from trainer.credit.estimators import estimator
        from trainer.optim.optimizer import VerlOptimizer
        from trainer.optim.process import describe_choices

        arrivals = Arrivals(of_groups, settings.store, [Topic.BUILDS], settings.trainer.poll_seconds)
        source = GroupReader(of_groups, settings, arrived=arrivals.lately)
        normalise = estimator(settings.trainer)

        def load(version: LedgerVersion) -> VerlOptimizer:
            optimizer = restore(
                version,
                ledger,
                source,
                settings.trainer,
                normalise,
                lambda model: VerlOptimizer(model, settings.trainer, engine_dtype=settings.engine.dtype),
            )
            logger.info("version %d of %s is loaded on %s", version.version, settings.trainer.policy, optimizer.device)
            logger.info("training with %s", describe_choices(settings.trainer, optimizer.device))
            return optimizer

        trainer = Trainer(
            settings=settings,
            ledger=ledger,
            source=source,
            normalise=normalise,
            mirror=Mirror(client, settings.store, ledger),
            publisher=publisher_of(settings),
            shutdown=shutdown,
            store_outage=outage,
            loaded=newest,
            load_optimizer=load,
            evaluation=Evaluation(client, settings, source.build_spec),
            watchers=parts.enter_context(closing(watchers_of(settings, store))),
            batch_times=lambda rollouts: batch_times(client, rollouts),
            arrived=lambda seconds: bool(arrivals.wait(seconds)),
            optimizer=load(newest) if follow and not settings.trainer.workers.colocated else None,
        )
        parts.enter_context(closing(trainer))
        trainer.start()
        trainer.run(follow=follow)
        if newest_version(ledger).version == newest.version and not follow:
            logger.info("%s", plan_of(settings, client, ledger).summary)
