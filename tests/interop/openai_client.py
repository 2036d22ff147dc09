"""The client library of OpenAI, unmodified, against an edge: what works, how errors look, and what happens if a client leaves.

Prints a JSON object with the results; tests compare it.
"""

import argparse
import json

import openai


def tokens_of(stream) -> str:
    """Joins the tokens of a stream of chunks."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def error_of(call) -> list[str | int | None]:
    """Returns the class, the status and the code of the error with which a call ends."""
    try:
        call()
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.code]
    except openai.APIError as error:
        return [type(error).__name__, None, error.code]
    return ["none", None, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8100/v1")
    parser.add_argument("--model", default="large")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=options.url, api_key="of-the-client", max_retries=0, timeout=20)
    model = options.model

    def chat(prompt: str, **more):
        message = {"role": "user", "content": prompt}
        return client.chat.completions.create(model=model, messages=[message], max_tokens=5, **more)

    seen: dict[str, object] = {}
    seen["models"] = [entry.id for entry in client.models.list()]
    answer = chat("hello")
    seen["chat"] = [answer.choices[0].message.content, answer.usage.completion_tokens]
    chunks = list(chat("hello", stream=True, stream_options={"include_usage": True}))
    seen["stream"] = [tokens_of(chunks), chunks[-1].usage.completion_tokens]
    seen["completion"] = client.completions.create(model=model, prompt="hello", max_tokens=3).choices[0].text
    raw = client.chat.completions.with_raw_response.create(
        model="auto", messages=[{"role": "user", "content": "hello"}], max_tokens=1
    )
    seen["served_by"] = raw.headers["x-paced-model"]
    seen["unknown_model"] = error_of(
        lambda: client.chat.completions.create(model="none", messages=[{"role": "user", "content": "x"}])
    )
    seen["engine_refuses"] = error_of(lambda: chat("refuse"))
    seen["broken_stream"] = error_of(lambda: list(chat("cut 2", stream=True)))
    def response(prompt: str, **more):
        return client.responses.create(model=model, input=prompt, instructions="be brief", max_output_tokens=5, **more)

    answer = response("hello")
    seen["response"] = [answer.output_text, answer.status, answer.usage.output_tokens]
    events = list(response("hello", stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    seen["response_stream"] = [text, events[-1].type, events[-1].response.usage.output_tokens]
    broken = list(response("cut 2", stream=True))[-1]
    seen["broken_response"] = [broken.type, broken.code, broken.sequence_number]
    seen["background"] = error_of(lambda: response("hello", background=True))
    seen["stored_response"] = error_of(lambda: client.responses.retrieve("resp_1"))
    # A stream left in the middle: the engine would continue for ever.
    stream = client.with_options(timeout=60).completions.create(
        model="opt-125m", prompt="stall 2", stream=True
    )
    next(iter(stream))
    stream.close()
    timed_out = error_of(lambda: client.with_options(timeout=1).completions.create(model="opt-125m", prompt="hang"))
    seen["timeout"] = timed_out[0]
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
