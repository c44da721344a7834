"""Options of the HTTP server, once each: `qengine serve` makes its flags from these fields."""

from __future__ import annotations

from dataclasses import dataclass

from qengine.config import option
from qengine.errors import ConfigError

SERVER = "server"


@dataclass(frozen=True)
class ServerConfig:
    """Options of `qengine serve` beside the engine's own. Times are in seconds."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for every interface", group=SERVER)
    port: int = option(8000, "Port to listen on; 0 takes a free one and prints it", group=SERVER)
    api_key: tuple[str, ...] = option(
        (),
        "Key that clients must send as `Authorization: Bearer KEY`, several allowed (also: QENGINE_API_KEY). "
        "/health and /version stay open",
        group=SERVER,
        metavar="KEY",
    )
    served_model_name: tuple[str, ...] = option(
        (), "Name of the model in the API, several allowed (default: MODEL as given)", group=SERVER, metavar="NAME"
    )
    chat_template: str | None = option(
        None, "Chat template: a file, or the Jinja text itself (default: the tokenizer's)", group=SERVER
    )
    trust_request_chat_template: bool = option(
        False, "Let requests bring their own `chat_template`. Off by default: it is code that runs here", group=SERVER
    )
    shutdown_timeout: float = option(
        30.0, "How long running requests may finish after SIGTERM or Ctrl-C, in seconds", group=SERVER
    )
    health_timeout: float = option(
        60.0, "/health answers 503 when the engine was silent or stood still for so long, in seconds", group=SERVER
    )
    max_body_bytes: int = option(32 * 2**20, "Largest request body in bytes; larger ones get HTTP 413", group=SERVER)
    access_log: bool = option(False, "Log a line for each HTTP request", group=SERVER)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("--port is out of range", have=self.port, need="0..65535")
        for name in ("shutdown_timeout", "health_timeout"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                need = "seconds above 0 and below infinity"
                raise ConfigError(f"--{name.replace('_', '-')} is out of range", have=value, need=need)
        if self.max_body_bytes < 1:
            raise ConfigError("--max-body-bytes must be positive", have=self.max_body_bytes, need=">= 1")
        for name in ("api_key", "served_model_name"):
            if not all(text.strip() for text in getattr(self, name)):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must not be empty or blank", hint=f"a text behind it, or leave {flag} out")
