"""The environments benchmark's own honesty: a step that is lost, played again or another session's is counted."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from benchmarks.environments import WARM_STEPS, drive, report


@pytest.mark.parametrize(
    ("skip", "more", "name", "wrong"), [(0, 0, "", (0, 0)), (3, 0, "", (1, 0)), (0, 3, "", (0, 1)), (0, 0, "x", (1, 0))]
)
async def test_environments_drive_counts_lost_double_and_foreign_steps(skip: int, more: int, name: str, wrong: tuple[int, int]) -> None:
    steps = 2

    async def session(request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        own = (await connection.receive_json())["data"]["name"]
        await connection.send_json({"type": "observation", "data": {}})
        for number in range(1, WARM_STEPS + steps + 1):
            message = (await connection.receive_json())["data"]["message"]
            last = number == WARM_STEPS + steps
            count = number - (skip if last else 0) + (more if last else 0)
            observation: dict[str, Any] = {"name": name if name and last else own, "count": count, "message": message}
            await connection.send_json({"type": "observation", "data": {"observation": observation}})
        return connection

    application = web.Application()
    application.router.add_get("/ws", session)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        driven = await drive(f"http://127.0.0.1:{runner.addresses[0][1]}", 1, steps)
    finally:
        await runner.cleanup()
    assert (driven.steps, driven.lost, driven.double) == (steps, *wrong)


def test_environments_report_has_medians_ratios_and_sums_of_checks() -> None:
    def rounds(rate: float, lost: int = 0) -> list[tuple[dict[str, float], dict[str, int]]]:
        return [({"steps_per_s": rate * n, "server_cpu_us": 1e6 / rate}, {"lost": lost, "double": 0}) for n in (1, 2, 30)]

    result = report({"ours": rounds(300.0), "ours_async": rounds(600.0, 1), "peer": rounds(100.0), "peer_workers": rounds(200.0, 2)})
    assert result["ours"]["steps_per_s"] == 600.0
    assert result["ratio"] == {
        "steps_per_s": 3.0,
        "steps_per_s_async": 6.0,
        "steps_per_s_workers": 1.5,
        "steps_per_s_async_workers": 3.0,
        "server_cpu": 3.0,
        "server_cpu_async": 6.0,
    }
    assert result["checked"] == {"lost": 3, "double": 0, "peer_lost": 0, "peer_workers_lost": 6}
