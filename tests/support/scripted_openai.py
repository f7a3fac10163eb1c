"""A model of the OpenAI Agents SDK that follows a script instead of thinking."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from agents import ModelResponse, Usage
from agents.models.interface import Model
from openai.types.responses import (
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

Step = tuple[str, dict[str, Any] | str] | str | Callable[[list[str]], Any]
"""A tool call, a last word, or either of them by what the tools told so far."""


class Scripted(Model):
    """Plays its steps in order; `heard` is what the tools told."""

    def __init__(self, *steps: Step, prefix: str = "call") -> None:
        self._steps = list(steps)
        self._prefix = prefix
        self._count = 0
        self.heard: list[str] = []

    async def get_response(
        self, system_instructions: str | None, input: Any, *rest: Any, **named: Any
    ) -> ModelResponse:
        if isinstance(input, list):
            self.heard = [
                str(one.get("output")) for one in input if str(one.get("type")).endswith("_output")
            ]
        step: Any = self._steps.pop(0)
        if callable(step):
            step = step(self.heard)
        self._count += 1
        if isinstance(step, str):
            text = ResponseOutputText(text=step, type="output_text", annotations=[], logprobs=[])
            said: Any = ResponseOutputMessage(
                id=f"m{self._count}",
                content=[text],
                role="assistant",
                status="completed",
                type="message",
            )
        else:
            name, arguments = step
            number = f"{self._prefix}-{self._count}"
            if isinstance(arguments, str):  # a tool of free text
                said = ResponseCustomToolCall(
                    call_id=number, name=name, input=arguments, type="custom_tool_call"
                )
                return ModelResponse(output=[said], usage=Usage(), response_id=None)
            said = ResponseFunctionToolCall(
                call_id=number,
                name=name,
                arguments=json.dumps(arguments),
                type="function_call",
            )
        return ModelResponse(output=[said], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **named: Any) -> AsyncIterator[Any]:
        raise NotImplementedError("the script is not streamed")
