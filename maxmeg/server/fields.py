"""The bodies of requests with the field names of OpenAI's API. Other fields are refused."""

import json
import typing
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from maxmeg.inference.embeddings import InputType, Pooling
from maxmeg.inference.sampling import TOP, Sampling

MOST_STOPS = 16
MOST_METADATA = 16
Token = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
Parsed = Annotated[Any, Field(exclude=True)]  # what OpenAI's client has read from a text beside it
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _as_biases(biases: dict[str, float]) -> dict[str, float]:
    for name in biases:
        if not (name.isascii() and name.isdigit()):
            raise ValueError(f"{name!r} is not a token id")
    return biases


def _of_object(parameters: dict[str, Any]) -> dict[str, Any]:
    if (kind := parameters.get("type", "object")) != "object":
        raise ValueError(f"the type of a function's parameters is 'object', not {kind!r}")
    return parameters


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Texts(Body):
    @model_validator(mode="after")
    def is_unicode(self) -> typing.Self:
        json.dumps(self.model_dump(), ensure_ascii=False).encode()  # refuses halves of surrogates
        return self


class StreamOptions(Body):
    include_usage: bool = False


class Generation(Texts):
    """What both endpoints that generate text take. None is the default of each field."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], AfterValidator(_as_biases)]
        | None
    ) = None
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    n: int | None = Field(None, ge=1, lt=2**31)
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    regex: Text | None = None
    grammar: Text | None = None
    ignore_eos: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, top_logprobs: int) -> Sampling:
        biases = sorted((int(name), value) for name, value in (self.logit_bias or {}).items())
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            top_logprobs=top_logprobs,
            repetition_penalty=self.repetition_penalty or 1.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=tuple(biases),
        )


class Completion(Generation):
    """POST /v1/completions."""

    prompt: str | list[Token] | list[str] | list[list[Token]]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=TOP)


class TextPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] | None = None
    parsed_arguments: Parsed = None


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Body):
    """A message of a chat. OpenAI's client sends the last five in a model's message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    parsed: Parsed = None


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_of_object)] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class PlainFormat(Body):
    type: Literal["text", "json_object"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class Chat(Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=TOP)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: PlainFormat | SchemaFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MOST_METADATA)] | None = None
    store: bool | None = None

    @property
    def may_call(self) -> bool:
        """Whether the reply may contain tool calls: JSON that was asked for is none."""
        is_text = self.response_format is None or self.response_format.type == "text"
        return bool(self.tools) and self.tool_choice != "none" and is_text

    def variables(self) -> dict[str, Any]:
        """Variables of the chat template, beside those that the server sets for every chat."""
        effort, others = self.reasoning_effort, self.chat_template_kwargs or {}
        if effort is None:
            return others
        return {"reasoning_effort": effort, "enable_thinking": effort != "none"} | others


class Embeddings(Texts):
    """POST /v1/embeddings."""

    model: str | None = None
    input: str | list[Token] | list[str] | list[list[Token]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: Pooling | None = None
    input_type: InputType | None = None
    truncate: bool | None = None


class Tokenize(Texts):
    """POST /tokenize."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class Detokenize(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Token]
