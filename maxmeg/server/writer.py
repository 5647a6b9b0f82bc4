"""The model that is served: prompts, chats and grammars become what the engine takes."""

import asyncio
import concurrent.futures
import dataclasses
import json
import logging
from collections.abc import Sequence

from maxmeg.config.options import Serve
from maxmeg.data.chat.conversation import normalized
from maxmeg.data.chat.template import (
    MOST_IDLE,
    ChatTemplate,
    NoTemplateError,
    load_chat_template,
)
from maxmeg.inference.engine import Engine
from maxmeg.inference.grammar import Grammar
from maxmeg.server.errors import ApiError
from maxmeg.server.fields import Chat, Generation, Message, SchemaFormat
from maxmeg.server.served import Served, several
from maxmeg.server.tools import ToolForm, schemas, tool_form

logger = logging.getLogger("maxmeg")
GRAMMARS = 64  # that are kept
SET = {"messages", "tools", "add_generation_prompt"}  # variables of a template, by the server
NO_VARIABLES = {"chat_template", "tokenize", "continue_final_message"}  # options of transformers


class ServedWriter(Served):
    """A model that continues texts, and answers chats if it has a template."""

    def __init__(self, engine: Engine, name: str, options: Serve) -> None:
        super().__init__(engine.trained, name, options)
        self.engine = engine
        self._grammars: dict[tuple[str, str], Grammar] = {}
        self._compiler = concurrent.futures.ThreadPoolExecutor(2)
        self._renderer = concurrent.futures.ThreadPoolExecutor(MOST_IDLE)
        templates = {**engine.trained.templates}
        try:
            templates[name] = load_chat_template(self.tokenizer, self.data.chat_template)
            self.template_text = templates[name].text
        except NoTemplateError:
            pass
        except ValueError as error:
            logger.warning(f"{name} answers no chats: {error}")
        self._templates = {  # clients read their errors: without a path of this machine
            each: dataclasses.replace(template, source="the chat template")
            for each, template in templates.items()
        }

    def template(self, name: str | None) -> ChatTemplate | None:
        """The chat template of the model or of an adapter."""
        return self._templates.get(name or self.name) or self._templates.get(self.name)

    def form(self, name: str | None) -> ToolForm | None:
        template = self.template(name)
        return tool_form(template.text) if template else None

    def prompts(self, prompt: str | Sequence) -> list[list[int]]:
        """The token ids of each prompt."""
        return [self.tokens(each) if isinstance(each, str) else [*each] for each in several(prompt)]

    async def chat(self, body: Chat) -> list[int]:
        """The tokens of a chat with the opening of the next answer."""
        template = self.template(body.model)
        if template is None:
            model = body.model or self.name
            raise ApiError(400, f"{model} has no chat template: /v1/completions continues text")
        if body.tools and not self.form(body.model):
            raise ApiError(400, "the chat template has no tool calls of a known form", "tools")
        self.check_messages(body.messages)
        messages, tools = normalized(
            [message.model_dump(exclude_none=True) for message in body.messages],
            [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        )
        reserved = SET | NO_VARIABLES | template.tokens.keys()
        reserved |= {"reasoning_effort"} if body.reasoning_effort else set()
        if refused := sorted(reserved & (body.chat_template_kwargs or {}).keys()):
            text = f"chat_template_kwargs cannot set {', '.join(refused)}: leave it out"
            raise ApiError(400, text, "chat_template_kwargs")
        variables, loop = body.variables() | {"tools": tools}, asyncio.get_running_loop()
        render = template.render
        (text,) = await loop.run_in_executor(self._renderer, render, [messages], [variables])
        self.check_length(text)
        tokenizer = self.tokenizer
        return (await self.encode(tokenizer.encode_marked, text, tokenizer.added)).tolist()

    def check_messages(self, messages: Sequence[Message]) -> None:
        """ApiError for a chat that cannot fit: it would keep the template from others."""
        most = self.options.max_prompt or self.model.max_position
        if len(messages) > most:
            raise ApiError(400, f"{len(messages)} messages have more than {most} tokens")
        parts = [part for m in messages if isinstance(m.content, list) for part in m.content]
        texts = [m.content for m in messages if isinstance(m.content, str)]
        texts += [text for m in messages for text in (m.reasoning, m.reasoning_content) if text]
        for text in [*texts, *(part.text for part in parts)]:
            self.check_length(text)

    async def grammar(self, body: Generation) -> tuple[Grammar | None, tuple[str, str] | None]:
        """The grammar that a request asks for in one of several ways, and its kind and text."""
        fields = ("regex", "regex", body.regex), ("grammar", "lark", body.grammar)
        grammars = [(name, kind, text) for name, kind, text in fields if text is not None]
        grammars += chat_grammars(body, self.form(body.model)) if isinstance(body, Chat) else []
        if len(grammars) > 1:
            fields = "regex, grammar, response_format and a required tool"
            raise ApiError(400, f"give one of {fields}")
        for field, kind, text in grammars:
            return await self._compiled(field, kind, text), (kind, text)
        return None, None

    async def _compiled(self, field: str, kind: str, text: str) -> Grammar:
        options, loop = self.options, asyncio.get_running_loop()
        if len(text) > options.max_grammar:
            limit = options.max_grammar
            raise ApiError(400, f"{field} of {len(text)} characters exceeds {limit}", field)
        if (kind, text) not in self._grammars:

            def compiled() -> Grammar:
                grammar = self.engine.grammars.compile(kind, text)
                return dataclasses.replace(grammar, seconds=options.mask_seconds)

            try:
                future = loop.run_in_executor(self._compiler, compiled)
                grammar = await asyncio.wait_for(future, options.grammar_seconds)
            except TimeoutError:
                limit = f"{options.grammar_seconds:g} s"
                raise ApiError(400, f"{field} is not compiled after {limit}", field) from None
            except ValueError as error:
                text = str(error).rpartition("JSON schema: ")[2]
                raise ApiError(400, f"{field}: {text}", field) from None
            self._grammars[kind, text] = grammar
            while len(self._grammars) > GRAMMARS:
                del self._grammars[next(iter(self._grammars))]
        return self._grammars[kind, text]


def chat_grammars(body: Chat, form: ToolForm | None) -> list[tuple[str, str, str]]:
    """Field, kind and text of the grammars that response_format and tool_choice ask for."""
    format, choice, grammars = body.response_format, body.tool_choice, []
    if isinstance(format, SchemaFormat):
        text = json.dumps(format.json_schema.schema_)
        grammars.append(("response_format", "json_schema", text))
    elif format and format.type == "json_object":
        grammars.append(("response_format", "json_object", ""))
    if choice in (None, "none", "auto"):
        return grammars
    if not body.tools or not form:
        raise ApiError(400, "tool_choice needs tools", "tool_choice")
    only = "" if isinstance(choice, str) else choice.function.name
    is_single = bool(only) or body.parallel_tool_calls is False
    functions = schemas(body.tools, only)
    try:
        return [*grammars, ("tools", "lark", form.grammar(functions, is_single))]
    except ValueError as error:
        raise ApiError(400, f"tools: {error}", "tools") from None
