"""Choice of the backend of a call: load, prefixes, limits, turns, canaries. Frozen upstreams stand for backends of any kind."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.pool import upstream
from gateway.pool.backend import Backend
from gateway.pool.policy import AFFINITY_CALLS, Canary, Policy, PoolFullError
from gateway.pool.queueing import FairQueue
from gateway.pool.upstream import BackendDownError, BackendStatus, FrozenUpstream, Upstream
from gateway.weights.publication import WeightsRelease
from spangrad.http.announcements import AttemptKey
from spangrad.settings import BackendSettings

A, B, C = (AttemptKey(name, 0) for name in "abc")


def policy_of(*limits: int | None, queue_limit: int = 100) -> tuple[Policy, list[Upstream]]:
    policy = Policy("policy", queue_limit)
    backends: list[Upstream] = [
        FrozenUpstream(f"policy-{number}", BackendSettings(url=f"http://upstream-{number}", kind="openai", limit=limit))
        for number, limit in enumerate(limits)
    ]
    for backend in backends:
        backend.changed = policy.changed
    policy.backends += backends
    return policy, backends


async def begun(policy: Policy, attempt: AttemptKey | None) -> asyncio.Task[Upstream]:
    """A call that has had the time to get a backend."""
    task = asyncio.create_task(policy.acquire(attempt))
    await asyncio.sleep(0)
    return task


async def test_acquire_takes_least_busy_backend_in_turns() -> None:
    policy, (first, second, third) = policy_of(None, None, None)
    assert [await policy.acquire(None) for _ in range(4)] == [first, second, third, first]
    policy.give_back(second)
    assert await policy.acquire(None) is second
    for backend in (first, first, second, third):
        policy.give_back(backend)
    # All are idle; the third was given the fewest.
    assert await policy.acquire(None) is third


class Large(FrozenUpstream):
    """A backend that computes three calls at once."""

    capacity = 3  # type: ignore[assignment]


async def test_acquire_divides_calls_by_capacity() -> None:
    policy, (small,) = policy_of(None)
    large = Large("policy-1", BackendSettings(url="http://upstream-1", kind="openai"))
    policy.backends.append(large)
    calls = [await policy.acquire(None) for _ in range(8)]
    assert (calls.count(small), calls.count(large)) == (2, 6)
    policy.all_at_once = True
    assert policy._free(policy.backends) == [small, large]
    small.in_flight, large.in_flight = 0, 9
    assert policy._free(policy.backends) == [small], "10 calls, of which 3 and 8 are their shares"


async def test_acquire_of_many_waiting_calls_takes_no_time_by_lines_and_backends() -> None:
    """All of 64 engines take new weights, one is done after the other, and 1,000 attempts wait."""
    policy, backends = policy_of(*[None] * 64, queue_limit=1000)
    policy.all_at_once = True
    for backend in backends:
        backend.in_flight, backend.status = 200, BackendStatus.PUBLISHING
    calls = [await begun(policy, AttemptKey(str(number), 0)) for number in range(1000)]
    began = time.process_time()
    for backend in backends:
        backend.set_status(BackendStatus.SERVING)
    assert time.process_time() - began < 3
    taken = [await call for call in calls]
    assert max(taken.count(backend) for backend in backends) == 16, "no more than its share"


class Restarting(FrozenUpstream):
    """A backend that is down like an engine that restarts: a call may try it while nothing was published."""

    may_be_tried = True  # type: ignore[assignment]


async def test_changed_looks_at_no_line_where_the_only_backend_with_room_restarts() -> None:
    policy, (full,) = policy_of(1)
    assert await policy.acquire(None) is full
    policy.served(WeightsRelease(1, "/models/v1", ""))
    call = await begun(policy, A)
    policy.backends.append(Restarting("policy-1", BackendSettings(url="http://upstream-1", kind="openai")))
    policy.backends[-1].status = BackendStatus.DOWN
    assert not policy._takes_calls()
    policy.give_back(full)
    assert await call is full


async def test_acquire_keeps_rollout_at_its_backend_until_much_busier() -> None:
    policy, (first, second) = policy_of(None, None)
    assert [await policy.acquire(A), await policy.acquire(B)] == [first, second]
    # Only b's calls: first is at 1, second at 1 more each time, and the ninth is too much.
    assert [await policy.acquire(B) for _ in range(AFFINITY_CALLS + 1)] == [second] * AFFINITY_CALLS + [second]
    assert second.in_flight - first.in_flight == AFFINITY_CALLS + 1
    assert await policy.acquire(B) is first
    # From then on that one holds it.
    policy.give_back(first)
    assert await policy.acquire(B) is first


@pytest.mark.parametrize("status", [BackendStatus.DOWN, BackendStatus.DRAINING, BackendStatus.PUBLISHING])
async def test_acquire_leaves_backend_that_takes_no_calls(status: BackendStatus) -> None:
    policy, (first, second) = policy_of(None, None)
    assert await policy.acquire(A) is first
    first.set_status(status)
    assert await policy.acquire(A) is second


async def test_acquire_beyond_limits_waits_and_alternates_rollouts() -> None:
    policy, (backend,) = policy_of(1)
    await policy.acquire(None)
    waiting = [(name, await begun(policy, attempt)) for name, attempt in (("a1", A), ("a2", A), ("a3", A), ("b1", B), ("c1", C), ("b2", B))]
    assert policy.waiting == 6
    order: list[str] = []
    for _ in waiting:
        policy.give_back(backend)
        await asyncio.sleep(0)
        order += [name for name, task in waiting if task.done() and name not in order]
        assert backend.in_flight == 1
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert policy.waiting == 0


async def test_acquire_with_full_queue_raises_pool_full_error() -> None:
    policy, (backend,) = policy_of(1, queue_limit=1)
    await policy.acquire(A)
    waiting = await begun(policy, A)
    with pytest.raises(PoolFullError, match=r"^1 calls wait for policy 'policy' already, as many as gateway.queue_limit allows"):
        await policy.acquire(B)
    policy.give_back(backend)
    assert await waiting is backend


async def test_acquire_cancelled_frees_turn_and_backend() -> None:
    policy, (backend,) = policy_of(1)
    await policy.acquire(None)
    first, second, third = [await begun(policy, attempt) for attempt in (A, B, C)]
    first.cancel()
    # Granted in the same instant in which it is cancelled: the backend goes on to the next.
    policy.give_back(backend)
    second.cancel()
    assert await third is backend
    assert (backend.in_flight, policy.waiting) == (1, 0)
    assert [first.cancelled(), second.cancelled()] == [True, True]


async def test_acquire_waiting_without_backend_left_raises() -> None:
    policy, (first, second) = policy_of(1, 1)
    await policy.acquire(A)
    await policy.acquire(A)
    waiting = await begun(policy, B)
    first.set_status(BackendStatus.DOWN, "first fell.")
    await asyncio.sleep(0)
    assert not waiting.done()
    second.set_status(BackendStatus.DOWN, "second fell.")
    with pytest.raises(BackendDownError, match=r"^first fell. second fell.$"):
        await waiting
    with pytest.raises(BackendDownError):
        await policy.acquire(A)
    with pytest.raises(BackendDownError, match=r"policy 'other' has no backend\. Register one by POST /admin/backends"):
        await Policy("other", 1).acquire(None)


async def test_acquire_while_all_backends_publish_waits_and_then_spreads() -> None:
    policy, (first, second) = policy_of(None, None)
    policy.all_at_once = True
    first.set_status(BackendStatus.PUBLISHING)
    second.set_status(BackendStatus.PUBLISHING)
    waiting = [await begun(policy, AttemptKey(str(number), 0)) for number in range(10)]
    first.set_status(BackendStatus.SERVING)
    # Half of them, and the one that may come next.
    assert first.in_flight == 6
    second.set_status(BackendStatus.SERVING)
    policy.all_at_once = False
    policy.changed()
    assert sorted(backend.name for backend in await asyncio.gather(*waiting)) == [first.name] * 6 + [second.name] * 4


async def test_acquire_while_single_backend_publishes_waits_and_all_are_served() -> None:
    policy, (backend,) = policy_of(None)
    policy.all_at_once = True
    backend.set_status(BackendStatus.PUBLISHING)
    waiting = [await begun(policy, A) for _ in range(3)]
    backend.set_status(BackendStatus.SERVING)
    assert await asyncio.gather(*waiting, policy.acquire(B)) == [backend] * 4


async def test_canary_gets_its_share_of_rollouts_and_no_other_call() -> None:
    policy = Policy("policy", 100)
    canary, stable = [Backend(f"policy-{n}", BackendSettings(url=f"http://engine-{n}"), None, 1) for n in range(2)]  # type: ignore[arg-type]
    policy.backends += [canary, stable]
    for backend in (canary, stable):
        backend.changed = policy.changed
        backend.set_status(BackendStatus.SERVING)
    policy.canary = Canary(canary, WeightsRelease(2, "/v2", "float32:2"), 0.25)
    attempts = [AttemptKey(f"r{number}", 0) for number in range(400)]
    chosen = {attempt: await policy.acquire(attempt) for attempt in attempts}
    assert 70 < sum(backend is canary for backend in chosen.values()) < 130
    # A rollout is served by one side, whatever the load, and its later attempts too.
    again = {attempt: await policy.acquire(AttemptKey(attempt.rollout_id, 1)) for attempt in attempts}
    assert again == chosen
    assert await policy.acquire(None) is stable
    stable.set_status(BackendStatus.DOWN, "stable fell.")
    own = next(one for one, backend in chosen.items() if backend is canary)
    other = next(one for one, backend in chosen.items() if backend is stable)
    assert await policy.acquire(own) is canary
    policy.releases = [WeightsRelease(1, "/v1", "float32:1")]
    with pytest.raises(BackendDownError):
        await policy.acquire(other)
    stable.set_status(BackendStatus.SERVING)
    canary.set_status(BackendStatus.DOWN, "canary fell.")
    assert await policy.acquire(own) is stable


async def test_acquire_unreached_engine_is_tried_unless_weights_were_published() -> None:
    policy = Policy("policy", 100)
    engine = Backend("policy-0", BackendSettings(url="http://engine"), None, 1)  # type: ignore[arg-type]
    policy.backends.append(engine)
    assert await policy.acquire(A) is engine
    policy.releases = [WeightsRelease(1, "/v1", "float32:1")]
    with pytest.raises(BackendDownError, match="is not admitted yet"):
        await policy.acquire(A)


async def test_acquire_excludes_backends_that_could_not_connect() -> None:
    policy, (first, second) = policy_of(None, None)
    assert await policy.acquire(A, {first.name}) is second
    assert policy.may_become_free(A, {first.name})
    assert not policy.may_become_free(A, {first.name, second.name})


async def test_call_avoiding_a_backend_delays_no_other_call() -> None:
    policy, (first, second) = policy_of(4, 1)
    busy = await policy.acquire(None, {first.name})
    first.set_status(BackendStatus.PUBLISHING)
    avoiding = asyncio.create_task(policy.acquire(None, {first.name}))
    await asyncio.sleep(0)
    others = [await begun(policy, None) for _ in range(3)]
    first.set_status(BackendStatus.SERVING)
    await asyncio.sleep(0)
    assert (first.in_flight, avoiding.done(), [other.done() for other in others]) == (3, False, [True] * 3)
    policy.give_back(busy)
    assert await avoiding is second


async def test_end_of_a_call_at_a_draining_backend_looks_at_no_waiting_call(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, (first, second) = policy_of(4, 4)
    calls = [await policy.acquire(None) for _ in range(8)]
    for backend in (first, second):
        backend.set_status(BackendStatus.PUBLISHING)
    waiting = [await begun(policy, AttemptKey(f"rollout-{number}", 0)) for number in range(50)]
    looked_at, choose = list[AttemptKey | None](), policy._choose
    monkeypatch.setattr(policy, "_choose", lambda attempt, avoid: looked_at.append(attempt) or choose(attempt, avoid))
    for call in calls:
        policy.give_back(call)
    assert looked_at == []
    first.set_status(BackendStatus.SERVING)
    await asyncio.sleep(0)
    assert sum(call.done() for call in waiting) == 4
    for call in waiting:
        call.cancel()


async def test_frozen_upstream_unreachable_rests_longer_each_time() -> None:
    loop = asyncio.get_running_loop()
    policy, (backend,) = policy_of(None)
    delays: list[float] = []

    def call_later(delay: float, callback: Any, *arguments: Any) -> asyncio.TimerHandle:
        delays.append(delay)
        wakes.append(lambda: callback(*arguments))
        return asyncio.TimerHandle(0, callback, arguments, loop)

    wakes: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_later", call_later, raising=False)
        for _ in range(8):
            await policy.acquire(A)
            backend.could_not_connect(OSError("refused"))
            policy.give_back(backend)
            with pytest.raises(BackendDownError, match=r"the upstream at http://upstream-0 does not answer \(refused\)"):
                await policy.acquire(A)
            wakes.pop()()
        assert delays == [1, 2, 4, 8, 16, 32, 60, 60]
        # A call that gets through makes all well again.
        policy.give_back(await policy.acquire(A))
        backend.could_not_connect(OSError("refused"))
        assert delays[-1] == 1


async def test_frozen_upstream_draining_during_rest_stays_draining(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "FIRST_BACKOFF_SECONDS", 0.0)
    policy, (backend, other) = policy_of(None, None)
    backend.could_not_connect(OSError("refused"))
    backend.set_status(BackendStatus.DRAINING)
    await asyncio.sleep(0.01)
    assert backend.status is BackendStatus.DRAINING
    assert [await policy.acquire(attempt) for attempt in (A, B)] == [other, other]


class Turns(RuleBasedStateMachine):
    """Lines of a fair queue: none is passed over more often than there are other lines."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int, tuple[int, int]] = FairQueue()
        self.lines: dict[int, list[tuple[int, int]]] = {}
        self.served_since: dict[int, list[int]] = {}
        self.count = 0

    @rule(key=st.integers(0, 4))
    def put(self, key: int) -> None:
        self.count += 1
        self.queue.put(key, (key, self.count))
        if not self.lines.get(key):
            self.served_since[key] = []
        self.lines.setdefault(key, []).append((key, self.count))

    @rule(data=st.data())
    @precondition(lambda self: len(self.queue) > 0)
    def discard(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from([one for line in self.lines.values() for one in line]))
        self.lines[waiter[0]].remove(waiter)
        self.queue.discard(waiter[0], waiter)
        self.queue.discard(waiter[0], waiter)

    @rule(served=st.sets(st.integers(0, 4)))
    def take(self, served: set[int]) -> None:
        taken = self.queue.take(lambda waiter: waiter if waiter[0] in served else None)
        able = {key for key, line in self.lines.items() if line and key in served}
        if taken is None:
            assert not able
            return
        key = taken[0]
        assert taken == self.lines[key].pop(0)
        # No other line is served twice while this one waits, and could be served each time.
        for other in self.lines.keys() - {key}:
            self.served_since[other] = [*self.served_since[other], key] if other in able else []
            assert len(self.served_since[other]) == len(set(self.served_since[other]))
        self.served_since[key] = []

    @invariant()
    def the_sizes_agree(self) -> None:
        assert len(self.queue) == sum(map(len, self.lines.values())) == len(list(self.queue))


class Leases(RuleBasedStateMachine):
    """Calls that begin, end and are cancelled in any order, and backends that fall and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.policy, self.backends = policy_of(1, 2, queue_limit=8)
        self.calls: list[tuple[AttemptKey, asyncio.Task[Upstream]]] = []
        self.passed: dict[asyncio.Task[Upstream], list[AttemptKey]] = {}

    def teardown(self) -> None:
        for _, task in self.calls:
            task.cancel()
        self.settle()
        for _, task in self.calls:
            if not task.cancelled() and not task.exception():
                self.policy.give_back(task.result())
        self.loop.close()
        assert [backend.in_flight for backend in self.backends] == [0, 0]
        assert self.policy.waiting == 0

    def settle(self) -> None:
        async def turn() -> None:
            for _ in range(3):
                await asyncio.sleep(0)

        waiting = {task for _, task in self.calls if not task.done()}
        first: dict[AttemptKey, asyncio.Task[Upstream]] = {}
        for attempt, task in self.calls:
            if task in waiting:
                first.setdefault(attempt, task)
        self.loop.run_until_complete(turn())
        begun = [one for one, task in self.calls if task in waiting and task.done() and not task.cancelled() and not task.exception()]
        # Counted from when a call is the first of its line.
        for task in first.values():
            if not task.done():
                self.passed.setdefault(task, []).extend(begun)

    @rule(rollout=st.sampled_from("abcd"))
    def begin(self, rollout: str) -> None:
        attempt = AttemptKey(rollout, 0)
        self.calls.append((attempt, self.loop.create_task(self.policy.acquire(attempt))))
        self.settle()

    @rule(data=st.data())
    @precondition(lambda self: any(task.done() and not task.cancelled() for _, task in self.calls))
    def end(self, data: st.DataObject) -> None:
        ended = data.draw(st.sampled_from([one for one in self.calls if one[1].done()]))
        self.calls.remove(ended)
        if not ended[1].cancelled() and not ended[1].exception():
            self.policy.give_back(ended[1].result())
        self.settle()

    @rule(data=st.data(), and_end=st.booleans())
    @precondition(lambda self: any(not task.done() for _, task in self.calls))
    def cancel(self, data: st.DataObject, and_end: bool) -> None:
        """Cancel a call, and maybe end another in the same instant."""
        cancelled = data.draw(st.sampled_from([one for one in self.calls if not one[1].done()]))
        cancelled[1].cancel()
        busy = [one for one in self.calls if one[1].done() and not one[1].cancelled() and not one[1].exception()]
        if and_end and busy:
            self.calls.remove(busy[0])
            self.policy.give_back(busy[0][1].result())
        self.settle()
        assert cancelled[1].cancelled()
        self.calls.remove(cancelled)

    @rule(number=st.integers(0, 1), status=st.sampled_from([BackendStatus.SERVING, BackendStatus.PUBLISHING, BackendStatus.DOWN]))
    def change(self, number: int, status: BackendStatus) -> None:
        self.backends[number].set_status(status)
        self.passed.clear()
        self.settle()

    @invariant()
    def limits_hold_and_nobody_waits_in_vain(self) -> None:
        leases = [task.result() for _, task in self.calls if task.done() and not task.cancelled() and not task.exception()]
        assert [backend.in_flight for backend in self.backends] == [leases.count(backend) for backend in self.backends]
        assert all(backend.in_flight <= (backend.limit or 0) for backend in self.backends)
        waiting = [attempt for attempt, task in self.calls if not task.done()]
        assert self.policy.waiting == len(waiting) <= 8
        if waiting:
            assert not any(backend.status is BackendStatus.SERVING and backend.has_room for backend in self.backends)
            assert any(backend.status is not BackendStatus.DOWN for backend in self.backends)

    @invariant()
    def no_rollout_is_passed_over_twice_by_the_same(self) -> None:
        for attempt, task in self.calls:
            passed = self.passed.get(task, [])
            others = [one for one in passed if one != attempt]
            assert task.done() or len(others) == len(set(others)), (attempt, passed)


TestTurns = Turns.TestCase
TestLeases = Leases.TestCase
TestTurns.settings = hypothesis_settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLeases.settings = hypothesis_settings(max_examples=120, stateful_step_count=40, deadline=None)
