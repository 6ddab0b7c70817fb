"""Published command-line agents work with a pool: each runs the tool that the model calls, sends
its result back, and shows the final answer. The model follows a script, so each run is the same."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.router import pools
from tests.support.needs import needs
from tests.support.nodes.talking_node import TalkingNode
from tests.support.project.agents import Agent, claude_code, codex, mini_swe_agent

QUESTION = "What does note.txt say?"
NOTE = "a four-leaf clover"
ANSWER = f"The note says: {NOTE}."
PATIENCE_S = 200.0  # a run takes 2 to 5 s
RESULT = "\n[tool]\n"  # how a tool's result begins in a prompt


def call(tool: str, **arguments: str) -> str:
    """A call, as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


async def run(agent: Agent, words: Sequence[str], folder: Path, **more: str) -> tuple[int, str]:
    """The exit code and the output of an agent that reaches this machine alone."""
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        # Nothing answers here, so other hosts cannot be reached.
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "https_proxy"), "http://127.0.0.1:9"),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
    }
    process = await asyncio.create_subprocess_exec(
        *(*agent.words, *words),
        cwd=folder,
        env={**variables, **agent.variables, **more},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def answered(
    agent: Agent,
    command: Callable[[str], Sequence[str]],
    folder: Path,
    answer: Callable[[str], str],
    api: str,
) -> TalkingNode:
    """Run an agent, whose command follows from the URL of the API, against a pool whose model
    answers so; check that it ends well."""
    (folder / "note.txt").write_text(f"{NOTE}\n")
    node = TalkingNode("decode-0", answer)
    async with node, pools.running(node) as client:
        url = client.url if api == "ANTHROPIC" else f"{client.url}/v1"
        addresses = {f"{api}_BASE_URL": url, f"{api}_API_KEY": "none"}
        code, output = await run(agent, command(url), folder, **addresses)
        assert code == 0, output
        assert NOTE in output
        first, *_, last = node.prompts
        assert QUESTION in first
        assert NOTE not in first
        result = last.rpartition(RESULT)[2]
        assert NOTE in result, "the tool ran, and its result came back"
        return node


async def test_claude_code_runs_a_tool_and_shows_the_answer(tmp_path: Path) -> None:
    needs("npm")
    words = ("-p", "--bare", "--model", "fake-model", "--allowedTools", "Bash(cat:*)", "--")

    def answer(prompt: str) -> str:
        return (
            ANSWER
            if RESULT in prompt
            else call("Bash", command="cat note.txt", description="Read it")
        )

    # Else it asks the model for a title of the session, too.
    agent = replace(claude_code(), variables={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"})
    command = (*words, QUESTION)
    node = await answered(agent, lambda url: command, tmp_path, answer, "ANTHROPIC")
    assert len(node.prompts) == 2


@pytest.mark.long  # its package has 170 MB
async def test_codex_runs_a_tool_and_shows_the_answer(tmp_path: Path) -> None:
    needs("npm")
    provider = 'name="baton", wire_api="responses", env_key="OPENAI_API_KEY"'
    words = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    settings = {
        "model": '"fake-model"',
        "model_provider": '"baton"',
        "web_search": '"disabled"',
        "features.multi_agent": "false",
    }
    flags = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]

    def answer(prompt: str) -> str:
        return ANSWER if RESULT in prompt else call("exec_command", cmd="cat note.txt")

    def command(url: str) -> list[str]:
        own = f'model_providers.baton={{base_url="{url}", {provider}}}'
        return [*words, *flags, "-c", own, QUESTION]

    node = await answered(codex(), command, tmp_path, answer, "OPENAI")
    assert len(node.prompts) == 2


@pytest.mark.parametrize("api", ["ANTHROPIC", "OPENAI"])
async def test_mini_swe_agent_runs_a_tool_and_submits(tmp_path: Path, api: str) -> None:
    needs("registry")
    model = f"{api.lower()}/fake-model"
    words = ("-t", QUESTION, "-m", model, "-y", "--exit-immediately", "-o", "run.json")
    agent = mini_swe_agent()
    settings = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }

    def answer(prompt: str) -> str:
        """Read the note, then end the task with it, as the agent's own prompt asks for."""
        submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat note.txt"
        return call("bash", command=submit if RESULT in prompt else "cat note.txt")

    agent = replace(agent, variables={**agent.variables, **settings})
    node = await answered(agent, lambda url: words, tmp_path, answer, api)
    assert len(node.prompts) == 2
    assert json.loads((tmp_path / "run.json").read_text())["info"]["exit_status"] == "Submitted"
