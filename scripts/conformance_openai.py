"""Runs the official openai package against a server that scripts/conformance has started.

Usage: conformance_openai.py BASE_URL KEY. Prints a line for each check and ends with "N passed, N failed".
"""
import asyncio
import json
import math
import struct
import sys
import traceback
import typing
import urllib.request

import usage

BASE, KEY = usage.arguments("BASE_URL KEY")

import openai  # noqa: E402
import pydantic  # noqa: E402

client = openai.OpenAI(base_url=BASE + "/v1", api_key=KEY, max_retries=0, timeout=120)
MODEL = client.models.list().data[0].id
HELLO = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Say hello."}]
TOOLS = [
    {"type": "function", "function": {"name": "get_time", "description": "Time in a zone", "parameters": {
        "type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"],
        "additionalProperties": False}}},
    {"type": "function", "function": {"name": "get_rain", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 20},
                                         "days": {"type": "integer", "minimum": 1, "maximum": 7}},
        "required": ["city", "days"], "additionalProperties": False}}},
]
checks = []


def ask(path, body=None):
    """What the package has no call for: the text of an answer."""
    data = None if body is None else json.dumps(body).encode()
    head = {"Authorization": "Bearer " + KEY, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(BASE + path, data, head), timeout=60) as r:
        return r.read().decode()


def tokenize(text, **more):
    return json.loads(ask("/tokenize", {"prompt": text, **more}))["tokens"]


def check(fn):
    checks.append(fn)
    return fn


def refused(kind, param, call, **kw):
    try:
        call(**kw)
    except kind as e:
        if param is not False:
            assert e.param == param, (e.param, e.body)
        return e
    raise AssertionError(f"not refused: {kw}")


@check
def models():
    listed = client.models.list()
    assert listed.data[0].object == "model"
    assert client.models.retrieve(MODEL).id == MODEL
    refused(openai.NotFoundError, "model", client.models.retrieve, model="no-such-model")


@check
def conversation():
    r = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, temperature=0, seed=1)
    first = r.choices[0].message.content
    assert first and r.choices[0].finish_reason in ("stop", "length")
    assert r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens
    again = HELLO + [{"role": "assistant", "content": first}, {"role": "user", "content": "And now goodbye."}]
    r2 = client.chat.completions.create(model=MODEL, messages=again, max_completion_tokens=8, temperature=0)
    assert r2.usage.prompt_tokens > r.usage.prompt_tokens
    assert r2.usage.prompt_tokens_details.cached_tokens > 0, r2.usage
    same = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, temperature=0, seed=2)
    assert same.choices[0].message.content == first


@check
def streaming():
    kw = dict(model=MODEL, messages=HELLO, max_tokens=10, temperature=0)
    whole = client.chat.completions.create(**kw).choices[0]
    text, role, finish, usage = "", None, None, None
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **kw):
        if chunk.usage:
            usage = chunk.usage
            assert not chunk.choices
            continue
        d = chunk.choices[0]
        role = role or d.delta.role
        text += d.delta.content or ""
        finish = d.finish_reason or finish
    assert (text, role, finish) == (whole.message.content, "assistant", whole.finish_reason)
    assert usage.completion_tokens == 10
    with client.chat.completions.stream(**kw) as s:  # the package's own assembly of events
        for _ in s:
            pass
        assert s.current_completion_snapshot.choices[0].message.content == text


@check
def choices_and_seeds():
    kw = dict(model=MODEL, messages=HELLO, max_tokens=8, temperature=1.0)
    r = client.chat.completions.create(n=3, seed=5, **kw)
    texts = [c.message.content for c in r.choices]
    assert [c.index for c in r.choices] == [0, 1, 2] and len(set(texts)) > 1
    parts = ["", "", ""]
    for chunk in client.chat.completions.create(n=3, seed=5, stream=True, **kw):
        for c in chunk.choices:
            parts[c.index] += c.delta.content or ""
    assert parts == texts


@check
def logprobs():
    r = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4, temperature=0, logprobs=True,
                                       top_logprobs=5)
    items = r.choices[0].logprobs.content
    assert len(items) == 4
    for t in items:
        assert t.logprob <= 0 and bytes(t.bytes).decode() == t.token and len(t.top_logprobs) == 5
        assert t.top_logprobs[0].token == t.token and math.isclose(t.top_logprobs[0].logprob, t.logprob, abs_tol=1e-5)
    assert "".join(t.token for t in items) == r.choices[0].message.content
    r = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2, logprobs=True)
    assert len(r.choices[0].logprobs.content) == 2
    c = client.completions.create(model=MODEL, prompt="One two three", max_tokens=3, temperature=0, logprobs=2,
                                  echo=True).choices[0]
    lp = c.logprobs
    assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset)
    assert lp.token_logprobs[0] is None and c.text.startswith("One two three")
    for token, at in zip(lp.tokens, lp.text_offset):
        assert c.text[at:at + len(token)] == token


@check
def completions():
    kw = dict(model=MODEL, prompt="The capital of France is", max_tokens=5, temperature=0)
    whole = client.completions.create(**kw)
    assert "Paris" in whole.choices[0].text
    text = "".join(c.choices[0].text for c in client.completions.create(stream=True, **kw))
    assert text == whole.choices[0].text
    many = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=2)
    assert [c.index for c in many.choices] == [0, 1, 2, 3]
    ids = tokenize(kw["prompt"])
    assert client.completions.create(**{**kw, "prompt": ids}).choices[0].text == text
    assert client.completions.create(**kw, stop=["."]).choices[0].text == text.split(".")[0]
    assert client.completions.create(**{**kw, "max_tokens": 1}, extra_body={"top_k": 1}).usage.completion_tokens == 1


@check
def bias():
    kw = dict(model=MODEL, messages=HELLO, max_tokens=3, temperature=0)
    first = client.chat.completions.create(**kw, logprobs=True, top_logprobs=2).choices[0].logprobs.content[0]
    ids = {t.token: tokenize(t.token, add_special_tokens=False) for t in first.top_logprobs}
    best, second = (ids[t.token][0] for t in first.top_logprobs)
    r = client.chat.completions.create(**kw, logit_bias={str(best): -100}, logprobs=True)
    assert r.choices[0].logprobs.content[0].token == first.top_logprobs[1].token
    r = client.chat.completions.create(**kw, logit_bias={str(second): 100})
    assert r.choices[0].message.content == first.top_logprobs[1].token * 3
    refused(openai.BadRequestError, "logit_bias.999999", client.chat.completions.create, **kw,
            logit_bias={"999999": 1})


@check
def errors():
    kw = dict(model=MODEL, messages=HELLO)
    create = client.chat.completions.create
    refused(openai.BadRequestError, "max_tokens", create, **kw, max_tokens=-1)
    refused(openai.BadRequestError, "temperature", create, **kw, temperature=-1)
    refused(openai.BadRequestError, "messages", create, model=MODEL, messages=[])
    refused(openai.BadRequestError, "n", create, **kw, n=10**9)
    refused(openai.NotFoundError, "model", create, model="wrong", messages=HELLO)
    e = refused(openai.BadRequestError, "messages", create, model=MODEL,
                messages=[{"role": "user", "content": "word " * 20000}])
    assert e.code == "context_length_exceeded", e.body
    wrong = openai.OpenAI(base_url=BASE + "/v1", api_key="wrong", max_retries=0)
    refused(openai.AuthenticationError, None, wrong.models.list)


@check
def leaving_a_stream():
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2000, stream=True,
                                            extra_body={"ignore_eos": True})
    for i, _ in enumerate(stream):
        if i == 3:
            break
    stream.close()
    for _ in range(100):
        text = ask("/metrics")
        line = next(x for x in text.splitlines() if x.startswith("llmrun:num_requests_running{"))
        if line.endswith(" 0"):
            return
    raise AssertionError(line)


@check
def many_at_once():
    async def run():
        c = openai.AsyncOpenAI(base_url=BASE + "/v1", api_key=KEY, max_retries=0, timeout=120)

        async def one(i):
            r = await c.chat.completions.create(model=MODEL, temperature=0, max_tokens=6,
                                                messages=[{"role": "user", "content": f"Count from {i % 4}."}])
            return i % 4, r.choices[0].message.content

        by_prompt = {}
        for k, text in await asyncio.gather(*(one(i) for i in range(16))):
            by_prompt.setdefault(k, set()).add(text)
        assert all(len(v) == 1 for v in by_prompt.values()), by_prompt

    asyncio.run(run())


@check
def embeddings():
    texts = ["a cat sat on the mat", "a kitten sat on the rug", "quarterly revenue rose by nine percent"]
    r = client.embeddings.create(model=MODEL, input=texts)  # the package asks for base64
    rows = [d.embedding for d in r.data]
    assert [d.index for d in r.data] == [0, 1, 2] and len({len(x) for x in rows}) == 1
    for x in rows:
        assert math.isclose(sum(v * v for v in x), 1, abs_tol=1e-4)
    plain = client.embeddings.create(model=MODEL, input=texts[0], encoding_format="float").data[0].embedding
    assert all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(plain, rows[0]))
    packed = struct.pack(f"<{len(plain)}f", *plain)
    assert len(packed) == 4 * len(plain)
    short = client.embeddings.create(model=MODEL, input=texts[0], dimensions=8, encoding_format="float")
    assert len(short.data[0].embedding) == 8
    cos = [sum(a * b for a, b in zip(rows[0], x)) for x in rows]
    assert cos[1] > cos[2], cos
    refused(openai.BadRequestError, "input", client.embeddings.create, model=MODEL, input=[])


@check
def tools_in_the_prompt():
    kw = dict(model=MODEL, messages=HELLO, max_tokens=4, temperature=0)
    plain = client.chat.completions.create(**kw)
    none = client.chat.completions.create(**kw, tools=TOOLS, tool_choice="none")
    auto = client.chat.completions.create(**kw, tools=TOOLS)
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens
    assert auto.usage.prompt_tokens > plain.usage.prompt_tokens
    history = HELLO + [
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone":"UTC"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"}]
    assert client.chat.completions.create(**{**kw, "messages": history}, tools=TOOLS).choices[0].message.content
    history[2]["tool_calls"][0]["function"]["arguments"] = "{"
    refused(openai.BadRequestError, "messages[2].tool_calls[0].function.arguments", client.chat.completions.create,
            **{**kw, "messages": history}, tools=TOOLS)
    refused(openai.BadRequestError, "tool_choice", client.chat.completions.create, **kw, tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "nope"}})


@check
def tools_that_must_be_called():
    kw = dict(model=MODEL, messages=[{"role": "user", "content": "Will it rain in Rome in the next 3 days?"}],
              tools=TOOLS, temperature=0, max_tokens=100)
    for choice, names in (("required", {"get_time", "get_rain"}),
                          ({"type": "function", "function": {"name": "get_rain"}}, {"get_rain"})):
        r = client.chat.completions.create(**kw, tool_choice=choice).choices[0]
        assert r.finish_reason == "tool_calls", r
        call = r.message.tool_calls[0].function
        assert call.name in names
        args = json.loads(call.arguments)
        if call.name == "get_rain":
            assert set(args) == {"city", "days"} and 1 <= args["days"] <= 7
        name, text, finish = None, "", None
        for chunk in client.chat.completions.create(**kw, tool_choice=choice, stream=True):
            d = chunk.choices[0]
            for t in d.delta.tool_calls or []:
                assert (t.id is not None) == (name is None)
                name = name or t.function.name
                text += t.function.arguments or ""
            finish = d.finish_reason or finish
        assert (name, text, finish) == (call.name, call.arguments, "tool_calls")


@check
def json_schema():
    kw = dict(model=MODEL, messages=[{"role": "user", "content": "A person, as JSON."}], max_tokens=200, temperature=0)
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
                                               "age": {"type": "integer", "minimum": 0, "maximum": 120}},
              "required": ["name", "age"], "additionalProperties": False}
    r = client.chat.completions.create(**kw, response_format={
        "type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}})
    value = json.loads(r.choices[0].message.content)
    assert set(value) == {"name", "age"} and 0 <= value["age"] <= 120 and len(value["name"]) <= 12
    r = client.chat.completions.create(**kw, extra_body={"guided_choice": ["red", "blue"]})
    assert r.choices[0].message.content in ("red", "blue")
    r = client.chat.completions.create(**kw, extra_body={"guided_regex": "[0-9]{3}-[a-f]{2}"})
    assert len(r.choices[0].message.content) == 6
    refused(openai.BadRequestError, "response_format.type", client.chat.completions.create, **kw,
            response_format={"type": "xml"})


@check
def parsed_models():
    class Item(pydantic.BaseModel):
        name: typing.Literal["apple", "pear"]
        count: int = pydantic.Field(ge=1, le=9)

    class Order(pydantic.BaseModel):
        kind: typing.Literal["book", "food"]
        items: list[Item] = pydantic.Field(min_length=1, max_length=2)
        note: typing.Literal["now", "later"] | None

    kw = dict(model=MODEL, messages=[{"role": "user", "content": "Order two apples."}], max_tokens=150, temperature=0)
    r = client.chat.completions.parse(**kw, response_format=Order)
    assert isinstance(r.choices[0].message.parsed, Order)
    tool = openai.pydantic_function_tool(Order, name="order")
    r = client.chat.completions.parse(**kw, tools=[tool], tool_choice="required")
    call = r.choices[0].message.tool_calls[0].function
    assert isinstance(call.parsed_arguments, Order)
    deltas = 0
    with client.chat.completions.stream(**kw, tools=[tool], tool_choice="required") as s:
        for event in s:
            deltas += event.type == "tool_calls.function.arguments.delta"
        last = s.get_final_completion().choices[0]
    assert deltas > 5 and last.finish_reason == "tool_calls"
    assert last.message.tool_calls[0].function.arguments == call.arguments


@check
def responses():
    kw = dict(model=MODEL, input="Say hello.", instructions="You are terse.", temperature=0, max_output_tokens=12)
    r = client.responses.create(**kw)
    assert r.output_text and r.status in ("completed", "incomplete") and r.usage.output_tokens <= 12
    kinds, text, last = [], "", None
    for event in client.responses.create(stream=True, **kw):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
        last = event
    assert text == r.output_text and last.response.output_text == text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    for kind in ("response.output_item.added", "response.content_part.added", "response.output_text.done",
                 "response.content_part.done", "response.output_item.done"):
        assert kinds.count(kind) == 1, kinds
    flat = [{"type": "function", **t["function"]} for t in TOOLS]
    r = client.responses.create(**{**kw, "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "What time is it in Rome?"}]},
        {"type": "function_call", "call_id": "c1", "name": "get_time", "arguments": '{"zone":"Europe/Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "12:00"}]}, tools=flat)
    assert r.output
    refused(openai.BadRequestError, "previous_response_id", client.responses.create, **kw,
            previous_response_id="resp_1")


failed = 0
for fn in checks:
    try:
        fn()
        print("ok   ", fn.__name__)
    except Exception:
        failed += 1
        print("FAIL ", fn.__name__)
        traceback.print_exc(limit=-2, file=sys.stdout)
print(f"{len(checks) - failed} passed, {failed} failed")
sys.exit(failed > 0)
