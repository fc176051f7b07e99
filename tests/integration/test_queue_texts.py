"""Texts that no database takes: what an agent has said is kept without them, a name that holds them is refused."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest

from tests.support.runners import failed, new_rollouts, queue_settings, serving

ROLLOUT = {"task_id": "t", "input": 1, "group_id": "g"}
PART = {"digest": "0" * 64, "first": 0}


async def test_attempt_detail_with_unstorable_text_is_sanitized(queue_db: str) -> None:
    async with serving(queue_settings(queue_db)) as (client, _), aiohttp.ClientSession(client.url) as session:
        await client.enqueue("run", new_rollouts(3))
        first, second, third = await client.lease("run", "worker", 3)
        failure = failed(first, detail="half \ud83d, null \x00, end")
        for _ in range(2):
            assert [result.refused for result in await client.fail([failure])] == [None]
        # Other workers post what they like.
        posted = {"rollout_id": second.rollout_id, "attempt": 0, "reason": "exception", "detail": "null \x00, end"}
        async with session.post("/v1/leases/fail", data=json.dumps({"failures": [posted]})) as answer:
            assert answer.status == 200
        assert [result.refused for result in await client.release([third], "null \x00, end")] == [None]
        details = [attempt.detail for name in ("r0", "r1", "r2") for attempt in (await client.rollout(name)).attempts]
        assert details == ["half ?, null , end", "null , end", "null , end"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/rollouts", {"run_id": "run", "rollouts": [{"task_id": "t\x00", "input": 1, "group_id": "g"}]}),
        ("POST", "/v1/rollouts", {"run_id": "run", "rollouts": [{**ROLLOUT, "prompt": {"name": "a\x00", "version": 1}}]}),
        ("POST", "/v1/rollouts", {"run_id": "run", "rollouts": [{**ROLLOUT, "prompt": {"name": "a", "version": 2**31}}]}),
        ("POST", "/v1/tasks", {**PART, "tasks": [{"task_id": "t", "input": 1, "prompt": {"name": "a", "version": 2**63}}]}),
        ("POST", "/v1/tasks", {**PART, "tasks": [{"task_id": "t", "input": 1, "prompt": {"name": "a\x00", "version": 1}}]}),
        ("POST", "/v1/leases", {"run_id": "run", "worker": "me\x00"}),
        ("POST", "/v1/leases/complete", {"completions": [{"rollout_id": "r\x00", "attempt": 0}]}),
        ("PUT", f"/v1/runs/{'r' * 513}/demand", {"policy": "policy", "branch": "main", "groups": 1}),
        ("PUT", f"/v1/runs/{'r' * 513}/tasks/train", {"digest": "0" * 64, "tasks": 0}),
        ("PUT", f"/v1/runs/run/tasks/{'t' * 513}", {"digest": "0" * 64, "tasks": 0}),
        ("GET", "/v1/rollouts/a%00", None),
        ("GET", "/v1/rollouts?run=a%00", None),
        ("GET", "/v1/rollouts?after=99999999999999999999", None),
        ("GET", "/v1/runs/run/ended?after=99999999999999999999", None),
    ],
)
async def test_queue_request_with_unstorable_text_answers_400(
    tmp_path: Path, method: str, path: str, body: dict[str, object] | None
) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/q.db")
    async with serving(settings), aiohttp.request(method, f"{settings.queue.url}{path}", data=body and json.dumps(body)) as answer:
        assert (answer.status, list(await answer.json())) == (400, ["error"])


@pytest.mark.parametrize(
    ("path", "of_many", "facts"), [("complete", "completions", {}), ("fail", "failures", {"reason": "exception", "retry": False})]
)
async def test_report_with_more_calls_than_the_database_counts_answers_400(
    queue_db: str, path: str, of_many: str, facts: dict[str, object]
) -> None:
    async with serving(queue_settings(queue_db)) as (client, _), aiohttp.ClientSession(client.url) as session:
        await client.enqueue("run", new_rollouts(1))
        await client.lease("run", "worker")
        for calls, status in ((2**63, 400), (2**31, 400), (2**31 - 1, 200)):
            report = {"rollout_id": "r0", "attempt": 0, "calls": calls, **facts}
            async with session.post(f"/v1/leases/{path}", json={of_many: [report]}) as answer:
                assert answer.status == status
        assert [attempt.calls for attempt in (await client.rollout("r0")).attempts] == [2**31 - 1]
