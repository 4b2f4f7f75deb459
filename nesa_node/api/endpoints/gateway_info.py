"""Endpoints `GET /v1/models`, `/v1/models/{id}`, `/health`, `/version`, and the page `/docs`.

The page shows the API from its OpenAPI description, without scripts or network access.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from html import escape
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from nesa_node import __version__
from nesa_node.api.gateway import Gateway, GatewayOf
from nesa_node.api.models.registry import ModelEntry
from nesa_node.api.openapi import KEY_STATUSES, Health, ModelCard, ModelList, Version, describe
from nesa_node.api.responses.http_responses import json_response
from nesa_node.api.schemas.generation_request import describe_sampling
from nesa_node.swarm.adapter_catalog import PublishedAdapter, find_published

router = APIRouter()


@router.get("/v1/models", **describe("List the models", None, ModelList, statuses=KEY_STATUSES))
async def list_models(gateway: GatewayOf) -> Response:
    cards = []
    for entry in gateway.models.entries():
        cards.append(_to_model_card(entry))
        cards += [_to_adapter_card(entry, name, each) for name, each in entry.adapters.items()]
    cards += [_to_network_card(gateway, name) for name in gateway.networks.names]
    return json_response({"object": "list", "data": cards})


@router.get(
    "/v1/models/{model_id:path}",
    **describe("Retrieve a model", None, ModelCard, statuses=(404, *KEY_STATUSES)),
)
async def retrieve_model(gateway: GatewayOf, model_id: str) -> Response:
    if (network := gateway.networks.find(model_id)) is not None:
        return json_response(_to_network_card(gateway, network))
    entry = gateway.models.find_entry(model_id)
    if (name := gateway.models.adapter_of(model_id)) is not None:
        adapter = find_published(entry.adapters.values(), name)
        return json_response(_to_adapter_card(entry, name, adapter))
    return json_response(_to_model_card(entry))


def _to_model_card(entry: ModelEntry) -> dict[str, Any]:
    defaults = None if entry.served is None else describe_sampling(entry.served.defaults)
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.created,
        "owned_by": "nesa-node",
        "max_model_len": entry.context_length,
        "default_sampling": defaults,
        "parent": None,
    }


def _to_network_card(gateway: Gateway, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": gateway.networks.created,
        "owned_by": "nesa-node",
        "max_model_len": None,
        "default_sampling": None,
        "parent": None,
    }


def _to_adapter_card(entry: ModelEntry, name: str, adapter: PublishedAdapter) -> dict[str, Any]:
    return {
        **_to_model_card(entry),
        "id": f"{entry.name}:{name}",
        "created": int(adapter.listed.created_at),
        "owned_by": adapter.author,
        "parent": entry.name,
    }


@router.get("/health", **describe("Tell whether requests can be served", None, Health, statuses=()))
async def health(gateway: GatewayOf) -> Response:
    """Return 200 while the process runs: a gateway that waits for nodes needs no restart."""
    models: list[dict[str, Any]] = []
    for entry in gateway.models.entries():
        holes = gateway.models.holes(entry)
        missing = None if holes is None else [[hole.start, hole.end] for hole in holes]
        models.append({"id": entry.name, "open": entry.is_open, "missing_blocks": missing})
    well = bool(models or gateway.networks.names) and all(
        model["missing_blocks"] == [] for model in models
    )
    return json_response({"status": "ok" if well else "degraded", "models": models})


@router.get("/version", **describe("Tell the gateway's version", None, Version, statuses=()))
async def version() -> Response:
    return json_response({"version": __version__})


PATH = "/docs"
_STYLE_CSS = """
:root{color-scheme:light dark;font:15px/1.5 system-ui,sans-serif}
body{max-width:60rem;margin:2rem auto;padding:0 1rem}
h2{margin-top:2.5rem;font:600 1.05rem ui-monospace,monospace}
table{border-collapse:collapse;width:100%}
td,th{padding:.25rem .75rem .25rem 0;text-align:left;vertical-align:top;border-top:1px solid #8884}
code,pre{font:13px ui-monospace,monospace;overflow-wrap:anywhere}
pre{padding:.75rem;background:#8882;overflow-x:auto}
"""
_DIGEST = b64encode(sha256(_STYLE_CSS.encode()).digest()).decode()
_CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_EXAMPLES = {
    "/v1/chat/completions": '{"messages": [{"role": "user", "content": "Hello"}]}',
    "/v1/completions": '{"prompt": "The capital of France is", "max_tokens": 16}',
    "/v1/responses": '{"input": "Hello"}',
    "/v1/images/generations": '{"prompt": "a cat on a mat", "size": "512x512"}',
    "/v1/embeddings": '{"input": "Hello"}',
    "/tokenize": '{"prompt": "Hello"}',
    "/detokenize": '{"tokens": [1, 2]}',
}


def docs_route(describe: Callable[[], dict[str, Any]]) -> Route:
    """Route of the page for the OpenAPI description that `describe` returns."""

    async def page(request: Request) -> Response:
        html = "".join(_render_page(describe(), str(request.base_url).rstrip("/")))
        return HTMLResponse(html, headers={"content-security-policy": _CONTENT_SECURITY_POLICY})

    return Route(PATH, page, methods=["GET"], include_in_schema=False)


def _render_page(spec: dict[str, Any], url: str) -> Iterator[str]:
    title = escape(f"{spec['info']['title']} {spec['info']['version']}")
    yield (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{_STYLE_CSS}</style></head>'
        f"<body><h1>{title}</h1><p>{escape(spec['info']['description'])} "
        'Complete description: <a href="/openapi.json">openapi.json</a>. '
        "Where keys are asked for, add <code>-H 'Authorization: Bearer KEY'</code>.</p>"
    )
    for path, operations in spec["paths"].items():
        for method, operation in operations.items():
            yield f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation['summary'])}.</p>"
            yield f"<pre>{escape(_curl_command(method, path, url))}</pre>"
            if "requestBody" in operation:
                (media,) = operation["requestBody"]["content"].values()
                yield from _render_fields(media["schema"], spec)
    yield "</body></html>"


def _curl_command(method: str, path: str, url: str) -> str:
    said = f"curl {url}{path.replace('{', '').replace('}', '').replace(':path', '')}"
    if path == "/v1/audio/transcriptions":
        said += " -F file=@speech.wav"
    elif method == "post":
        body = _EXAMPLES.get(path, "{}")
        said += f" -H 'Content-Type: application/json' \\\n  -d '{body}'"
    return said


def _render_fields(schema: dict[str, Any], spec: dict[str, Any]) -> Iterator[str]:
    schema = _resolve_ref(schema, spec)
    required = set(schema.get("required", ()))
    yield "<table><tr><th>field<th>type<th></tr>"
    for name, field in schema.get("properties", {}).items():
        note = "required" if name in required else field.get("description", "")
        yield (
            f"<tr><td><code>{escape(name)}</code><td>{escape(_describe_type(field))}"
            f"<td>{escape(str(note))}</tr>"
        )
    yield "</table>"


def _resolve_ref(schema: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = spec["components"]["schemas"][name] if name else schema
    return found


def _describe_type(field: dict[str, Any]) -> str:
    """Short type of a field, for readers; the full schema is in /openapi.json."""
    kinds = [one for one in field.get("anyOf", [field]) if one.get("type") != "null"]
    words = [
        _describe_values(one["enum"])
        if "enum" in one
        else one.get("$ref", "").rpartition("/")[2] or one.get("type", "any")
        for one in kinds
    ]
    return " or ".join(dict.fromkeys(words)) or "null"


def _describe_values(allowed: list[Any]) -> str:
    """Allowed values of a field; null, the default, is shown only if it is the only one."""
    values = [json.dumps(value) for value in allowed if value is not None]
    return " or ".join(values) or "null: has no effect here"
