"""A chat model of LangChain that follows a script instead of thinking."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult


class Scripted(BaseChatModel):
    """Plays its steps in order: tool calls as (name, arguments), or a last word."""

    steps: list[Any]

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **more: Any) -> Scripted:
        return self

    def _generate(self, messages: list[BaseMessage], *rest: Any, **more: Any) -> ChatResult:
        step = self.steps.pop(0)
        if isinstance(step, str):
            said = AIMessage(content=step)
        else:
            name, arguments = step
            call = {"name": name, "args": arguments, "id": f"call-{len(messages)}"}
            said = AIMessage(content="", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=said)])
