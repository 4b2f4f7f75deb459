"""litellm asks once, and once more as a stream."""

from __future__ import annotations

import json
import os
import sys

from litellm import completion  # type: ignore[import-not-found]


def ask(stream: bool) -> object:
    return completion(
        f"openai/{os.environ['MODEL']}",
        [{"role": "user", "content": sys.argv[1]}],
        api_base=os.environ["BASE_URL"],
        api_key=os.environ["API_KEY"],
        temperature=0,
        max_tokens=24,
        stream=stream,
    )


answer = ask(stream=False)
chunks = ask(stream=True)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)  # type: ignore[attr-defined]
print(json.dumps({"answer": answer.choices[0].message.content, "streamed": streamed}))  # type: ignore[attr-defined]
