"""The gateway's cost of a token in streams with tools, beside plain ones: `make bench-tool-streams`.

A deployment as `baton up` starts it, with a simulated engine. Windows of plain streams and of streams whose request
offers tools, and whose answers are therefore parsed, take turns; what is compared is the processor time of the
gateway's process per token in neighbouring windows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from random import Random
from typing import Any, Final

from baton.cli.tiny_model import make_tiny_model
from benchmarks.deployment import deployment
from benchmarks.gateway_load import EVENT, HOST
from benchmarks.hostile import gateway_family, ratio_of
from benchmarks.processes import threads, used_s
from benchmarks.report import Row, report

ENGINE_OPTIONS: Final = {
    "speed": 4.0, "blocks": 8192, "context_tokens_max": 4096, "eos_probability": 0.0, "running_max": 64,
}  # fmt: skip
TEMPLATE: Final = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{{ tools | tojson }}</tools>\nFor each call, answer with "
    "<tool_call>\n{...}\n</tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
"""A template of Hermes' family."""
TOOL: Final = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
STREAMS: Final = 16
TOKENS: Final = 256
MODEL: Final = "tiny"


async def stream(port: int, body: dict[str, Any]) -> int:
    """Return the number of events of one stream that is read to its end."""
    reader, writer = await asyncio.open_connection(HOST, port)
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    answer = await reader.read(-1)
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200") or b"[DONE]" not in answer:
        raise SystemExit(f"a stream failed: {answer[:500]!r}")
    return answer.count(EVENT)


async def window(port: int, seed: int, tools: list[dict[str, Any]]) -> int:
    """Return the number of events of a window's streams."""

    def body(number: int) -> dict[str, Any]:
        message = {"role": "user", "content": f"What is the weather like in city {seed} {number}?"}
        asked = {"model": MODEL, "messages": [message], "stream": True, "max_tokens": TOKENS, "ignore_eos": True}
        return {**asked, "tools": tools} if tools else asked

    return sum(await asyncio.gather(*(stream(port, body(number)) for number in range(STREAMS))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of windows (default 10)")
    arguments = parser.parse_args()
    tools: list[dict[str, Any]] = [{"type": "function", "function": TOOL}]
    no_tools: list[dict[str, Any]] = []
    sides: list[tuple[float, float]] = []
    events_per_token: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / MODEL
        make_tiny_model(model)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        path = model / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
        flags = ["--engine", "simulated", "--prefill", "0", "--disaggregation", "never", "--model", str(model)]
        options = ["--engine-options", json.dumps(ENGINE_OPTIONS)]
        with deployment(Path(folder), [*flags, *options]) as ports:
            gateway = gateway_family(ports.launcher_pid)

            def cost_s(seed: int, offered: list[dict[str, Any]]) -> float:
                """Return the gateway's processor time per token of one window."""
                before = threads([gateway])
                events = asyncio.run(window(ports.http, seed, offered))
                events_per_token.append(events / (STREAMS * TOKENS))
                return used_s(before, threads([gateway])) / (STREAMS * TOKENS)

            for number in range(2):
                cost_s(-1 - number, tools[number:])
            for number in range(arguments.pairs):
                orders = (no_tools, tools) if number % 2 else (tools, no_tools)
                costs = {bool(offered): cost_s(2 * number + bool(offered), offered) for offered in orders}
                sides.append((costs[True], costs[False]))
    ratio, low, high = ratio_of(sides, Random(1))
    with_tools_us, plain_us = (statistics.median(each) * 1e6 for each in zip(*sides, strict=True))
    title = "gateway CPU per token, streams with tools"
    row = Row(name=title, unit="µs", ours=with_tools_us, peers={"plain": plain_us}, ratio=ratio)
    notes = (
        f"{arguments.pairs} pairs of windows of {STREAMS} streams of {TOKENS} tokens; at least "
        f"{min(events_per_token):.2f} events per token; the ratio's 95 % interval is {low:.2f} to {high:.2f}"
    )
    report("tool_streams", [row], notes=notes)


if __name__ == "__main__":
    main()
