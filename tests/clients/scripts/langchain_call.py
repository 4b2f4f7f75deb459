"""LangChain's ChatOpenAI asks once, and once more as a stream."""

from __future__ import annotations

import json
import os
import sys

from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]

model = ChatOpenAI(
    base_url=os.environ["BASE_URL"],
    api_key=os.environ["API_KEY"],
    model=os.environ["MODEL"],
    temperature=0,
    max_tokens=24,
)
answer = model.invoke(sys.argv[1])
streamed = "".join(chunk.content for chunk in model.stream(sys.argv[1]))
print(json.dumps({"answer": answer.content, "streamed": streamed, "usage": answer.usage_metadata}))
