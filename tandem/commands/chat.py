"""`tandem chat`: a streaming chat in the terminal, or one answer per line of a pipe."""

import asyncio
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import TandemError
from common.lifecycle.exit_codes import EXIT_FAILURE, EXIT_OK
from common.settings.parse import parse
from common.settings.readers import auto, integer, number, text
from common.settings.setting import setting
from tandem.client.conversation import ChatOptions, Conversation
from tandem.client.default_url import default_url
from tandem.client.gateway_client import GatewayClient
from tandem.client.settings import ClientSettings
from tandem.console import complain, notes

QUIT = "/quit"
RESET = "/reset"
PROMPT = "> "


@dataclass(frozen=True, kw_only=True)
class ChatSettings(ClientSettings):
    """Talk to a model. /reset forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C stops the current answer.

    From a pipe every line is a question of the same conversation.
    """

    model: str | None = setting(
        None, "model; auto: the first that the gateway serves", auto(text), env="TANDEM_CLIENT_MODEL"
    )
    system: str | None = setting(None, "system message; auto: none", auto(text), env="TANDEM_CHAT_SYSTEM")
    temperature: float | None = setting(None, "0 is greedy; auto: the model's", auto(number(0, 2)))
    top_p: float | None = setting(None, "nucleus of the distribution; auto: the model's", auto(number(0, 1)))
    max_tokens: int | None = setting(None, "longest answer; auto: what fits", auto(integer(1)), unit="tokens")
    seed: int | None = setting(None, "makes answers repeatable; auto: random", auto(integer(-(1 << 63), (1 << 63) - 1)))


def run(argv: Sequence[str]) -> int:
    """Chat until the end of the input; non-zero if a question from a pipe had no answer."""
    settings = parse(ChatSettings, argv, os.environ, "tandem chat")
    for stream in (sys.stdin, sys.stdout):  # neither a foreign byte nor a plain locale ends the chat
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    with asyncio.Runner() as runner:
        client = GatewayClient(settings.url or default_url(), api_key=settings.api_key, tls=settings.tls())
        runner.run(client.__aenter__())
        try:
            model = settings.model or runner.run(client.first_model())
            return _chat(runner, Conversation(client, _options(settings, model), settings.system), model)
        finally:
            runner.run(client.__aexit__(None, None, None))


def _chat(runner: asyncio.Runner, conversation: Conversation, model: str) -> int:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - line editing for input(); not every Python has it elsewhere

        notes.print(f"chatting with {model}; {RESET} starts over, {QUIT} ends, Ctrl-C stops an answer")
    code = EXIT_OK
    while (question := _next_question(is_terminal)) is not None:
        if question == RESET:
            conversation.reset()
        elif question and not _answer(runner, conversation, question) and not is_terminal:
            code = EXIT_FAILURE
    return code


def _next_question(is_terminal: bool) -> str | None:
    """Return the next line, None at the end; Ctrl-C throws the line away."""
    try:
        line = input(PROMPT) if is_terminal else sys.stdin.readline()
    except EOFError:
        return None
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return ""
    is_over = (not line and not is_terminal) or line.strip() == QUIT
    return None if is_over else line.strip()


def _answer(runner: asyncio.Runner, conversation: Conversation, question: str) -> bool:
    """Stream one answer; return whether it came."""
    try:
        runner.run(conversation.ask(question, _show))
    except KeyboardInterrupt:
        notes.print("\n(stopped)")
    except TandemError as error:
        _show("\n")
        complain(error)
        return False
    else:
        _show("\n")
    return True


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _options(settings: ChatSettings, model: str) -> ChatOptions:
    return ChatOptions(
        model=model,
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_tokens=settings.max_tokens,
        seed=settings.seed,
    )
