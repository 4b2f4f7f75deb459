"""Several jobs of one request: few run at once, and all are answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from nesa_node.api.generation.job import GenerationEvent, Job
from nesa_node.api.models.jobs import MAX_CONCURRENT_JOBS
from tests.api.scripted import NAME, hello, serving, until


async def test_of_many_prompts_of_a_request_few_are_computed_at_once(tokenizer: Any) -> None:
    goes_on = asyncio.Event()

    async def waits(job: Job) -> AsyncIterator[GenerationEvent]:
        await goes_on.wait()
        async for event in hello(job):
            yield event

    async with serving(tokenizer, waits) as server:
        body = {"model": NAME, "prompt": ["hello"] * (2 * MAX_CONCURRENT_JOBS + 1)}
        asking = asyncio.create_task(server.post("/v1/completions", body))
        await until(lambda: server.model.running >= MAX_CONCURRENT_JOBS)
        await asyncio.sleep(0.05)
        assert server.model.running == MAX_CONCURRENT_JOBS
        goes_on.set()
        answer = (await asking).json()
        assert len(server.model.jobs) == len(answer["choices"]) == 2 * MAX_CONCURRENT_JOBS + 1
