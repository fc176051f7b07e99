"""Acts in a sandbox as SWE-agent does, by the package swe-rex, in whose environment it runs: RemoteRuntime, and nothing of ours.

Arguments: the server's host with its scheme, its port, and the API key. Prints a JSON object of what happened.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from swerex.deployment.remote import RemoteDeployment
from swerex.exceptions import BashIncorrectSyntaxError, CommandTimeoutError, NonZeroExitCodeError, SessionDoesNotExistError
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)


async def raised(awaitable):
    """Return the name and the text of an error."""
    try:
        return ["nothing", str(await awaitable)]
    except Exception as error:
        return [type(error).__name__, str(error)]


def tree(directory):
    """Make a directory with a file in another one, and return that one."""
    below = directory / "below"
    below.mkdir(parents=True)
    below.joinpath("file.txt").write_text("uploaded")
    return below


async def main(host, port, key):
    """Use every method of the protocol."""
    deployment = RemoteDeployment(auth_token=key, host=host, port=port)
    await deployment.start()
    runtime = deployment.runtime
    seen = {"alive": bool(await runtime.is_alive())}
    await runtime.write_file(WriteFileRequest(path="/tmp/start.sh", content="export STARTED=yes\n"))
    await runtime.create_session(CreateBashSessionRequest(startup_source=["/tmp/start.sh"], startup_timeout=60))

    def act(command, **values):
        return runtime.run_in_session(BashAction(command=command, **values))

    await act("cd /tmp && greet() { echo hello $STARTED; }", timeout=60)
    kept = await act("greet; pwd", timeout=60)
    seen["kept"] = [kept.output, kept.exit_code]
    silent = await act("false", timeout=60, check="silent")
    seen["silent"] = silent.exit_code
    seen["raise"] = await raised(act("exit_code() { return 3; }; exit_code", timeout=60, check="raise", error_msg="mine"))
    seen["syntax"] = await raised(act("echo a\nif then", timeout=60))
    assert seen["syntax"][0] == BashIncorrectSyntaxError.__name__
    seen["timeout"] = (await raised(act("sleep 600", timeout=0.5)))[0]
    running = asyncio.create_task(act("touch /tmp/begun; sleep 600", check="silent"))
    while (await runtime.execute(Command(command=["test", "-e", "/tmp/begun"]))).exit_code:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.1)
    await runtime.run_in_session(BashInterruptAction())
    seen["interrupted"] = (await running).exit_code
    asks = r"while read -r -p '? ' line; do [ $line = quit ] && break; echo got $line; done"
    opened = await act(asks, timeout=60, is_interactive_command=True, expect=[r"\? $"])
    greeted = await act("hello", timeout=60, is_interactive_command=True, expect=["never", r"\? $"])
    seen["open"] = [opened.output, opened.expect_string, greeted.output, greeted.expect_string]
    seen["busy"] = (await raised(act("true", timeout=60)))[1]
    seen["unmatched"] = (await raised(act("x", timeout=0.5, is_interactive_command=True)))[0]
    left = await act("quit", timeout=60, is_interactive_quit=True)
    seen["left"] = [left.output, left.exit_code, (await act("echo $line", timeout=60)).output]
    results = [await act("printf 'a? b? '; read -r line; echo got $line; cat", timeout=60, is_interactive_command=True, expect=[r"\? "])]
    for line, pattern in (("hi", r"\? "), ("later", "got hi")):
        results.append(await act(line, timeout=60, is_interactive_command=True, expect=[pattern]))
    seen["unread"] = [[result.output, result.expect_string] for result in results]
    await runtime.run_in_session(BashInterruptAction())
    seen["after"] = (await act("echo after", timeout=60)).output
    await act("trap '' INT; echo $$; cat", timeout=60, is_interactive_command=True, expect=["[0-9]+"])
    await runtime.run_in_session(BashInterruptAction())
    seen["killed"] = (await act("echo killed", timeout=60)).output
    waits = await act("echo ready; sleep 600", timeout=60, expect=["ready"])
    await runtime.run_in_session(BashInterruptAction())
    seen["expected"] = [waits.output, waits.expect_string]
    seen["other_session"] = (await raised(act("true", session="other")))[0]
    ran = await runtime.execute(Command(command=["sh", "-c", "pwd; echo $X; echo bad >&2; exit 4"], env={"X": "1"}, cwd="/tmp"))
    seen["execute"] = [ran.stdout, ran.stderr, ran.exit_code]
    seen["shell"] = (await runtime.execute(Command(command="echo a | tr a b; echo c >&2", shell=True, merge_output_streams=True))).stdout
    seen["check"] = (await raised(runtime.execute(Command(command=["false"], check=True))))[0]
    seen["slow"] = (await raised(runtime.execute(Command(command=["sleep", "600"], timeout=0.5))))[0]
    seen["missing"] = (await raised(runtime.read_file(ReadFileRequest(path="/tmp/nowhere"))))[0]
    with tempfile.TemporaryDirectory() as directory:
        source = tree(Path(directory, "tree"))
        await runtime.upload(UploadRequest(source_path=str(source / "file.txt"), target_path="/tmp/one.txt"))
        await runtime.upload(UploadRequest(source_path=str(source.parent), target_path="/tmp/tree"))
    paths = ("/tmp/one.txt", "/tmp/tree/below/file.txt")
    seen["uploaded"] = [(await runtime.read_file(ReadFileRequest(path=path))).content for path in paths]
    await runtime.close_session(CloseBashSessionRequest())
    seen["closed"] = (await raised(act("true")))[0]
    await runtime.close()
    seen["fresh"] = (await runtime.execute(Command(command=["cat", "/tmp/one.txt"]))).exit_code
    await deployment.stop()
    assert {seen["raise"][0], seen["check"]} == {NonZeroExitCodeError.__name__}
    assert {seen["timeout"], seen["slow"]} == {CommandTimeoutError.__name__}
    assert {seen["other_session"], seen["closed"]} == {SessionDoesNotExistError.__name__}
    return seen


print(json.dumps(asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))))
