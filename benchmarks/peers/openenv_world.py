"""The same world on OpenEnv's own server, `app` for uvicorn, and in Gymnasium's vector of processes; runs in the peer's environment.

In: for the vector, numbers of environments and of steps. Out: the vector's steps a second, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def application() -> Any:
    """Return OpenEnv's application."""
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class WorldAction(Action):
        message: str

    class WorldObservation(Observation):
        name: str
        count: int
        message: str = ""

    class World(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, name: str = "", **kwargs: Any) -> WorldObservation:
            self.name, self.count = name, 0
            return WorldObservation(name=name, count=0)

        def step(self, action: WorldAction, timeout_s: float | None = None, **kwargs: Any) -> WorldObservation:  # type: ignore[override]
            self.count += 1
            return WorldObservation(name=self.name, count=self.count, message=action.message, reward=1.0)

        @property
        def state(self) -> State:
            return State(step_count=self.count)

    return create_fastapi_app(World, WorldAction, WorldObservation, max_concurrent_envs=10_000)


def vector(environments: int, steps: int) -> float:
    """Return the steps a second of a vector of processes, all environments together."""
    import gymnasium
    import numpy

    class Counting(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(0, 1e9, (1,), numpy.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
            self.count = 0
            return numpy.zeros(1, numpy.float32), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.count += 1
            return numpy.full(1, self.count, numpy.float32), 1.0, False, False, {}

    together = gymnasium.vector.AsyncVectorEnv([Counting] * environments)
    together.reset()
    actions = numpy.zeros(environments, numpy.int64)
    began = time.perf_counter()
    for _ in range(steps):
        counts = together.step(actions)[0]
    seconds = time.perf_counter() - began
    together.close()
    assert (counts == steps).all()
    return environments * steps / seconds


if __name__ == "__main__":
    print(json.dumps({"steps_per_s": vector(int(sys.argv[1]), int(sys.argv[2]))}))
else:
    app = application()
