"""URLs that trajectories may be posted to, and signatures of what is posted."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest

from runner.process.callbacks import CallbackHosts, CallbackRefusedError, signed_headers


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://trainer:9000/x", ["trainer:9000"]),
        ("http://Trainer:9000", ["trainer"]),
        ("https://trainer/x?y=1", ["trainer:443"]),
        ("http://[::1]:80/x", ["[::1]"]),
    ],
)
def test_check_callback_of_an_allowed_host_passes(url: str, allowed: list[str]) -> None:
    CallbackHosts(allowed).check(url)


@pytest.mark.parametrize(
    ("url", "allowed", "words"),
    [
        ("http://trainer:9001/x", ["trainer:9000"], "does not list trainer:9001"),
        ("http://trainer/x", [], "does not list trainer:80"),
        ("http://trainer@evil/x", ["trainer"], "does not list evil:80"),
        ("http://trainer.evil/x", ["trainer"], "does not list trainer.evil:80"),
        ("http://:80/x", ["trainer"], "is no URL of a host"),
        ("http://trainer:99999/x", ["trainer"], "is no URL of a host"),
    ],
)
def test_check_callback_of_another_host_is_refused(url: str, allowed: list[str], words: str) -> None:
    with pytest.raises(CallbackRefusedError, match=words):
        CallbackHosts(allowed).check(url)


def test_signed_headers_hold_the_hmac_of_id_time_and_body() -> None:
    headers = signed_headers("run é/key/0/1", 1700000000, b"{}", "secret")
    assert headers["webhook-id"] == "run%20%C3%A9/key/0/1"
    digest = hmac.digest(b"secret", b"run%20%C3%A9/key/0/1.1700000000.{}", hashlib.sha256)
    assert headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()
