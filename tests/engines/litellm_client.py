"""litellm, unmodified, against an edge: what works, how errors look, and what happens if a client leaves or times out.

Prints a JSON object with the results; tests compare it.
"""

import argparse
import asyncio
import json

import litellm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8100/v1")
    options = parser.parse_args()
    access = {"api_base": options.url, "api_key": "of-the-client", "max_retries": 0, "timeout": 20}

    def request(model: str, prompt: str, **more) -> dict:
        messages = [{"role": "user", "content": prompt}]
        return {"model": f"openai/{model}", "messages": messages, **access, **more}

    # Makes the engine's answers reproducible.
    same = {"max_tokens": 6, "temperature": 0, "extra_body": {"cache_prompt": False}}
    prompt = "ba de fi go"

    def error_of(call) -> list:
        try:
            call()
        except Exception as error:  # noqa: BLE001, its class is reported
            return [type(error).__name__, getattr(error, "status_code", None)]
        return ["none", None]

    def text_of(chunks) -> str:
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    async def stream() -> str:
        chunks = await litellm.acompletion(**request("small", prompt, stream=True, **same))
        return text_of([chunk async for chunk in chunks])

    seen: dict[str, object] = {}
    models = litellm.get_valid_models(
        check_provider_endpoint=True,
        custom_llm_provider="openai",
        api_base=options.url,
        api_key=access["api_key"],
    )
    seen["models"] = sorted(models)
    answer = litellm.completion(**request("small", prompt, **same))
    choice = answer.choices[0]
    seen["chat"] = [choice.message.content, answer.usage.completion_tokens, choice.finish_reason]
    chunks = list(
        litellm.completion(**request("small", prompt, stream=True, stream_options={"include_usage": True}, **same))
    )
    usage = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    seen["stream"] = [text_of(chunks), usage[-1].completion_tokens if usage else None]
    seen["async_stream"] = asyncio.run(stream())
    plain = litellm.text_completion(model="openai/large", prompt=prompt, max_tokens=3, **access)
    seen["completion"] = plain.usage.completion_tokens
    headers = answer._hidden_params.get("additional_headers", {})
    seen["served_by"] = headers.get("llm_provider-x-paced-model")
    seen["unknown_model"] = error_of(lambda: litellm.completion(**request("none", "x")))
    seen["engine_refuses"] = error_of(lambda: litellm.completion(**request("emulated", "refuse")))
    seen["engine_fails"] = error_of(lambda: litellm.completion(**request("emulated", "fail")))
    broken = error_of(lambda: list(litellm.completion(**request("emulated", "cut 2", stream=True))))
    seen["broken_stream"] = "none" if broken[0] == "none" else "error"
    # A stream left in the middle: the engine would continue for ever.
    left = litellm.completion(**request("emulated", "stall 2", stream=True))
    next(iter(left))
    left.completion_stream.close()
    timed_out = error_of(lambda: litellm.completion(**{**request("emulated", "hang"), "timeout": 1}))
    seen["timeout"] = timed_out[0]
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
