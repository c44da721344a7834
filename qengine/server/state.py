"""What the handlers of one server share."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from qengine.config import EngineConfig
from qengine.errors import RequestError
from qengine.runtime.input_processor import InputProcessor
from qengine.server.config import ServerConfig
from qengine.server.engine_client import EngineClient
from qengine.server.errors import ApiError
from qengine.server.metrics import Metrics
from qengine.text import Tokenizer

T = TypeVar("T")

DEMO_NAME = "SmolLM2-135M-Instruct"
"""Name in the API of the model that is served when none is named."""
TEXT_THREADS = 4
"""Threads for templates and tokenising: a huge prompt must not hold up small ones, nor /health."""


class ServerState:
    """Made once the engine is ready; reading the tokenizer may raise UserError."""

    def __init__(self, client: EngineClient, engine_config: EngineConfig, config: ServerConfig) -> None:
        self.client = client
        self.config = config
        self.names = config.served_model_name or (engine_config.model or DEMO_NAME,)
        self._by_priority = engine_config.scheduling_policy == "priority"
        self.created = int(time.time())
        self.metrics = Metrics(self.names[0], lambda: client.stats)
        self.input = InputProcessor.from_engine(
            client.facts, trust_remote_code=engine_config.trust_remote_code, chat_template=config.chat_template
        )
        self.tokenizer.least_tokens("")  # reads the vocabulary once, now rather than at the first request
        self._pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.input.tokenizer
        assert tokenizer is not None  # from_engine always loads one
        return tokenizer

    async def in_thread(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run text work beside the event loop."""
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def check_model(self, name: str | None) -> str:
        """The name that the answer carries: the client's own, or the first. ApiError 404 for an unknown one."""
        if name is None or name in self.names:
            return name or self.names[0]
        served = ", ".join(self.names)
        text = f"the model {name!r} does not exist; what would work: {served}"
        raise ApiError(404, text, param="model", code="model_not_found")

    def checked_priority(self, priority: int | None) -> int:
        """The request's priority; RequestError when this server takes none."""
        if priority and not self._by_priority:
            hint = "leave it out, or serve with --scheduling-policy priority"
            raise RequestError("requests are served first come, first served", param="priority", hint=hint)
        if priority and abs(priority) >= 2**31:
            raise RequestError("priority is out of range", param="priority", have=priority, need="32 bits")
        return priority or 0

    def check_template_allowed(self, chat_template: str | None) -> None:
        """ApiError 400 when a request brings its own template and the server does not allow that."""
        if chat_template is not None and not self.config.trust_request_chat_template:
            raise ApiError(
                400,
                "chat_template in a request is code that runs on the server; what would work: "
                "serve with --chat-template FILE, or with --trust-request-chat-template",
                param="chat_template",
                code="chat_template_refused",
            )


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
