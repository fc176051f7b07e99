"""OpenEnv's server of its maze, for uvicorn: `maze_env.server.app` with more sessions than one. Runs in OpenEnv's environment."""

from __future__ import annotations

from maze_env.models import MazeAction, MazeObservation
from maze_env.server.maze_env_environment import MazeEnvironment
from openenv.core.env_server.http_server import create_app

SESSIONS = 64

app = create_app(MazeEnvironment, MazeAction, MazeObservation, env_name="maze_env", max_concurrent_envs=SESSIONS)
