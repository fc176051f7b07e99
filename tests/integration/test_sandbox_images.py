"""Sandboxes with an image's file system: its programs run, this machine's files are not there, the digest is on each action's span."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from runner.sandboxes import bubblewrap
from runner.sandboxes.engines import prepare
from runner.sandboxes.images import UnpackedImage, unpack
from runner.sandboxes.policy import SandboxLimits, SandboxPolicy
from runner.tools.toolbox import open_toolbox
from spangrad import semconv
from spangrad.errors import SandboxError
from spangrad.types import SandboxRung
from tests.support.images import layer, system_files, write_image

pytestmark = pytest.mark.skipif(bubblewrap.shortcoming() is not None, reason=str(bubblewrap.shortcoming()))
LIMITS = SandboxLimits(processes=64, memory_bytes=2**30, disk_bytes=2**24)


@pytest.fixture(scope="module")
def base() -> Generator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.fixture(scope="module")
def image(base: Path) -> UnpackedImage:
    if not (files := system_files()):
        pytest.skip("this machine has no /usr/bin/python3.11, of which the image is made")
    lower = layer({**files, "etc/mark": b"lower", "srv/removed": b""})
    write_image(base / "image", [lower, layer({"etc/mark": b"upper", "srv/.wh.removed": b""})], ["PATH=/usr/bin", "GREETING=hello"])
    return unpack(base / "image", base / "cache")


@pytest.fixture
def policy(base: Path, image: UnpackedImage) -> SandboxPolicy:
    (directory := base / "task").mkdir(exist_ok=True)
    (directory / "given").write_text("given\n")
    return SandboxPolicy(directory, (), {}, False, LIMITS, image)


async def test_toolbox_in_an_image_sees_its_files_alone(policy: SandboxPolicy, image: UnpackedImage) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with open_toolbox(policy, provider=provider) as tools:
        assert await tools.call("shell", {"command": "cat /etc/mark; echo $GREETING $PATH; cat given; ls /srv"}) == (
            "upperhello /usr/bin\ngiven\n"
        )
        assert await tools.python("import sys; sys.executable") == "'/usr/bin/python3'\n"
        for path in ("/etc/passwd", "/usr/share", "/usr/bin/env", str(image.root)):
            assert "No such file" in await tools.call("shell", {"command": f"ls {path}"})
        assert "Read-only file system" in await tools.call("shell", {"command": "echo x > /etc/mark"})
        await tools.write_file(f"{tools.sandbox.home}/own", "x")
    assert {(span.attributes or {})[semconv.SANDBOX_IMAGE] for span in exporter.get_finished_spans()} == {image.digest}


def test_prepare_with_an_image_needs_mounts_and_an_interpreter(policy: SandboxPolicy, image: UnpackedImage) -> None:
    with pytest.raises(SandboxError, match="landlock does not: an image needs mounts of its own"):
        prepare(replace(policy, engine=SandboxRung.LANDLOCK))
    with pytest.raises(SandboxError, match=r"has no python3 in its PATH, which a sandbox needs \(3.9 or newer\)"):
        prepare(replace(policy, image=replace(image, interpreter=None)))
