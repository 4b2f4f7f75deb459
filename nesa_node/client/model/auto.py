"""Construction of a distributed model: config, embedding and head, blocks kept by the client."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.head import EmbeddingAndHead, HeadBatcher
from nesa_node.client.model.layers import LocalConnection
from nesa_node.client.routing.request import ConnectionOptions
from nesa_node.client.session.base import SALT_BYTES, Connect, SwarmConnection
from nesa_node.client.speculation.draft_model import open_drafting
from nesa_node.client.speculation.drafting import Drafting
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import Span
from nesa_node.core.settings.addresses import parse_peer_address
from nesa_node.core.settings.choices import (
    AuditorChoice,
    AuditScheme,
    ClientQuantType,
    Precision,
    RedundancyName,
    RouteName,
    StrategyName,
)
from nesa_node.core.settings.declaration import (
    default_audits_path,
    default_cache_dir,
    default_decisions_path,
    secret_text,
    user_path,
)
from nesa_node.core.settings.models import DEFAULT_AUDIT_RATE, ClientConfig
from nesa_node.core.wait_tracking import track_wait
from nesa_node.engine.kernels.threads import fix_threads
from nesa_node.engine.model.devices import (
    check_quant_type,
    choose_device,
    require_room_for_embedder_and_head,
)
from nesa_node.engine.model.embedder_and_head import load_embedder_and_head
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.files import convert_parse_errors
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.engine.weights.tokenizer import load_discovered_tokenizer, load_tokenizer
from nesa_node.verification.distributions import ComputeLogits


class AutoDistributedModelForCausalLM:
    """Factory of `DistributedModelForCausalLM`, by `from_pretrained`. Not instantiated."""

    def __init__(self) -> None:
        raise TypeError("use AutoDistributedModelForCausalLM.from_pretrained(name, ...)")

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        initial_peers: str | Sequence[str] = (),
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | Path | None = None,
        routing: RouteName = "chain",
        client_blocks: tuple[int, int] = (0, 0),
        swarm_key: str | None = None,
        identity_path: str | Path | None = None,
        step_timeout_s: float = 30.0,
        recovery_timeout_s: float = 60.0,
        queue_timeout_s: float = 600.0,
        replicate_cache: bool = False,
        quality: str = "exact",
        min_precision: Precision = "nf4",
        strategy: StrategyName = "exact-latency",
        reuse_prefix: bool = True,
        prefix_salt: bytes | None = None,
        adapter: str | None = None,
        audit: float = DEFAULT_AUDIT_RATE,
        auditors: AuditorChoice = "auto",
        audit_scheme: AuditScheme = "relative-l2",
        require_attestation: str | Path | None = None,
        verify: RedundancyName = "none",
        private: str = "none",
        stock: int = 16,
        keep_session: str | Path | None = None,
        publish_evidence: bool = False,
        deployment: str | Path | None = None,
        draft: str | Path = "off",
        client_quant_type: ClientQuantType = "none",
    ) -> DistributedModelForCausalLM:
        """Make a model with its blocks in the swarm that serves `name` (a folder or hub name).

        Only embedding, final norm and head are loaded here, in `dtype` (`torch_dtype` is its older
        name; by default the checkpoint's own) on `device`, and with `client_blocks=(first, last)`
        that many of the first and last blocks. The swarm is joined through `initial_peers` when the
        first session opens. `recovery_timeout_s` is how long a session waits for a replacement of a
        lost node, `queue_timeout_s` how long it waits for free cache at busy nodes,
        `step_timeout_s` how long for a step before its nodes are pinged. With `replicate_cache`
        each node has a successor that holds a recent copy of its cache, for quick failover.

        `quality` bounds the compression of hidden states on slow links: none ("exact"), at most
        0.5% of perplexity ("high") or 3% ("balanced"), or a codec's name for all links ("lossless",
        "int8", ...: `compression/codecs.py`). `min_precision` is the coarsest quantization of
        weights and KV caches that nodes may use: "nf4", "int8" or "full". `strategy` is the rule
        that chooses chains (`routing/strategies.py`).

        With `reuse_prefix` sessions reuse what nodes still hold of earlier ones with the same first
        tokens. Nodes see digests salted with `prefix_salt` (16 to 64 bytes; by default random, for
        this model only). Clients with the same salt share prefixes on nodes if their operators
        trust all these clients, and a client with a fixed identity (`identity_path`) finds its own
        again. Not with `client_blocks` at the end of the model.

        `adapter` names a published LoRA adapter (`nesa-node adapters list`) that nodes use beside
        the model in all sessions that name no other one.

        `audit` is the share of a session's nodes (0 to 1) whose work is computed again once it is
        done, ten times as large for nodes that passed fewer than three audits: by this process, if
        this machine has the weights of their blocks, else by other nodes, but not in a star
        (`auditors` "auto"; "client": never by nodes; "nodes": always). A node that computed
        something else is logged by name and not used any more. `audit_scheme` is how outputs are
        compared (`verification/schemes.py`). `keep_session` is a folder for what the audited nodes
        got and gave in each session, which `nesa-node verify` audits again; it tells the session's
        text. `publish_evidence` shows the hidden states of wrong work to up to three nodes with the
        same blocks, which check them and report the node that lied.

        `require_attestation` is a policy (a JSON or TOML file): only nodes are used whose hardware
        proves what it demands (`docs/verification.md`).

        `verify="2of3"` has three nodes compute each block, in a star, and believes two that agree;
        a node that is outvoted is replaced at that token. "paper": all three must agree ("Secure
        Multiparty Generative AI", algorithm 2, with its dHash), else `WrongActivationsError`.
        "cdv": three whole chains without a common node compute everything, and next-token
        distributions are believed that two of them agree on; a chain that is outvoted is left at
        that token. Not with `client_blocks` at the end of the model.

        With `private="ckks"` nodes that run with `--private ckks` multiply their weights with
        encrypted vectors that they cannot read, and everything else is computed here, with the
        attention caches (so are `client_blocks`, whose weights this process holds). They see when
        and how many tokens are computed. Each product is checked; a node with a wrong one is not
        asked again. Seconds for each token. With "masks" vectors are hidden by random numbers,
        which such nodes have multiplied before: for `stock` tokens they are kept, and made again
        while nothing is asked.

        `private="noise:EPS,DELTA,CLIP"` scales each hidden state that is sent to a norm of at most
        CLIP and adds normal noise that makes it (EPS, DELTA)-differentially private by itself.
        Each session draws new noise, which nodes can average over sessions with the same text; the
        log says what all of a connection come to. What that keeps is in `docs/privacy.md`.

        `deployment` is the file of a private deployment of this model (`nesa-node deploy`): its
        members compute the blocks that they were sent, in a star, and no swarm is joined. The first
        and last blocks are computed here, as many as the file says.

        `draft` has several tokens drafted and verified in one step, as many as pay by what was
        measured, and none while nodes are busy: "lookup" drafts what followed the last tokens
        earlier in the text; the folder or name of a small model with the same vocabulary drafts by
        that model, too, in this process; "auto" does both where the model's folder has a `draft`
        folder. Greedy and seeded tokens are those of "off" (`docs/speculation.md`).

        `client_quant_type` holds what is loaded here in "int8" or "nf4": a step of a model with a
        large vocabulary gets faster, and its tokens are not quite those of the model
        (`docs/evaluation.md`).

        Raises the `ModelError`s of `open_checkpoint`, and `ConfigError` for contradictory
        arguments, a missing device and malformed initial peers.
        """
        if dtype is not None and torch_dtype is not None and dtype != torch_dtype:
            raise ConfigError(f"dtype={dtype} and torch_dtype={torch_dtype}: give one of them")
        peers = (initial_peers,) if isinstance(initial_peers, str) else tuple(initial_peers)
        peers = tuple(map(parse_peer_address, peers))
        device = choose_device(device)
        cache = default_cache_dir() if cache_dir is None else user_path(cache_dir)
        checkpoint = open_checkpoint(str(name), revision=revision, token=token, cache_dir=cache)
        resolved = checkpoint.resolve_dtype(str(dtype or torch_dtype or "auto"))
        options = ConnectionOptions(
            initial_peers=peers,
            routing=routing,
            swarm_key=swarm_key,
            identity_path=None if identity_path is None else user_path(identity_path),
            step_timeout_s=step_timeout_s,
            recovery_timeout_s=recovery_timeout_s,
            queue_timeout_s=queue_timeout_s,
            replicate_cache=replicate_cache,
            quality=quality,
            min_precision=min_precision,
            strategy=strategy,
            audit=audit,
            auditors=auditors,
            audit_scheme=audit_scheme,
            verify=verify,
            private=private,
            stock=stock,
            audits_path=default_audits_path(),
            require_attestation=(
                None if require_attestation is None else user_path(require_attestation)
            ),
            keep_session=None if keep_session is None else user_path(keep_session),
            publish_evidence=publish_evidence,
            deployment=None if deployment is None else user_path(deployment),
            decisions_path=default_decisions_path(),
        )
        if options.deployment is not None:
            client_blocks = read_client_blocks(options.deployment, checkpoint, client_blocks)
        return build_model(
            checkpoint,
            connect_by(checkpoint, options, resolved),
            dtype=resolved,
            device=device,
            quant_type=client_quant_type,
            client_blocks=client_blocks,
            prefix_salt=choose_prefix_salt(reuse_prefix, prefix_salt),
            adapter=adapter,
            drafting=open_drafting(
                str(draft),
                checkpoint,
                partial(open_checkpoint, cache_dir=cache, token=token),
                build_local_model,
                private=private,
                decisions_path=options.decisions_path,
            ),
        )


def connect_by(checkpoint: Checkpoint, options: ConnectionOptions, dtype: torch.dtype) -> Connect:
    """Join the swarm that serves `checkpoint` by `options`; hidden states are sent in `dtype`."""

    def connect(head: ComputeLogits) -> AbstractAsyncContextManager[SwarmConnection]:
        if (noise := options.noise) is not None:
            from nesa_node.client.session.noisy_connection import open_noisy_connection

            return open_noisy_connection(checkpoint, options, dtype, head, noise)
        if options.deployment is not None:
            from nesa_node.client.deployment.deployment_connection import (
                open_deployment_connection,
            )

            return open_deployment_connection(checkpoint, options, dtype)
        if options.private != "none":
            from nesa_node.client.private.private_connection import open_private_connection

            return open_private_connection(checkpoint, options, dtype)
        from nesa_node.client.session.connection import open_connection

        return open_connection(checkpoint, options, dtype, head)

    return connect


def build_model(
    checkpoint: Checkpoint,
    connect: Connect,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    quant_type: ClientQuantType = "none",
    client_blocks: tuple[int, int] = (0, 0),
    prefix_salt: bytes | None = None,
    adapter: str | None = None,
    drafting: Drafting | None = None,
) -> DistributedModelForCausalLM:
    """Make a model over `checkpoint` that reaches the swarm's blocks through `connect`.

    What is loaded here is held as `quant_type` says. Raises `ConfigError`, and as `load_blocks`
    does.
    """
    with ExitStack() as stack:
        if drafting is not None:
            stack.callback(drafting.close)
        first, remote, last = split_blocks(checkpoint.num_blocks, client_blocks)
        resolved = checkpoint.resolve_dtype(str(dtype or "auto"))
        place = choose_device(device)
        check_quant_type("--client-quant-type", quant_type, place, get_args(ClientQuantType))
        with track_wait("embedding and head to be loaded"):
            embedder, head = load_embedder_and_head(
                checkpoint, dtype=resolved, device=place, quant_type=quant_type
            )
        ends = EmbeddingAndHead(
            embedder,
            HeadBatcher(head, embedder.embed_rows),
            head.apply_final_norm,
            resolved,
            quant_type,
            place,
            checkpoint.config.hidden_size,
            head.lm_head,
            head.logits_with_gradients,
        )
        local: LocalConnection | None = None
        if own := [span for span in (first, last) if len(span)]:
            with track_wait("weights to be loaded", blocks=own):
                local = LocalConnection(
                    [
                        load_blocks(
                            checkpoint, span, dtype=resolved, device=place, quant_type=quant_type
                        )
                        for span in own
                    ]
                )
                stack.callback(local.close)
        return DistributedModelForCausalLM(
            checkpoint.config,
            load_generation_config(checkpoint),
            ends,
            connect,
            ((local, first), (None, remote), (local, last)),
            checkpoint=checkpoint,
            prefix_salt=prefix_salt,
            adapter=adapter,
            drafting=drafting,
            on_close=stack.pop_all().close,
        )


def build_local_model(checkpoint: Checkpoint) -> DistributedModelForCausalLM:
    """Make a model with all of its blocks in this process, in the dtype of its files."""

    def refuse(_: ComputeLogits) -> NoReturn:
        raise AssertionError("a model with all of its blocks in this process joins no swarm")

    return build_model(checkpoint, refuse, client_blocks=(checkpoint.num_blocks, 0))


def choose_prefix_salt(reuse_prefix: bool, salt: bytes | None) -> bytes | None:
    """Salt of prompt digests; None disables the prefix cache. Raises `ConfigError`."""
    if salt is not None and not reuse_prefix:
        raise ConfigError("prefix_salt without reuse_prefix: give one of them")
    if salt is not None and not 16 <= len(salt) <= 64:
        raise ConfigError(f"prefix_salt of {len(salt)} bytes: it must have 16 to 64")
    if not reuse_prefix:
        return None
    return secrets.token_bytes(SALT_BYTES) if salt is None else salt


def split_blocks(num_blocks: int, client_blocks: tuple[int, int]) -> tuple[Span, Span, Span]:
    """Spans of the client's first blocks, the swarm's, the client's last. Raises `ConfigError`."""
    first, last = client_blocks
    if first < 0 or last < 0 or first + last > num_blocks:
        raise ConfigError(f"client_blocks={client_blocks} of a model that has {num_blocks} blocks")
    return Span(0, first), Span(first, num_blocks - last), Span(num_blocks - last, num_blocks)


def load_generation_config(checkpoint: Checkpoint) -> GenerationConfig:
    """Generation config as transformers' `from_pretrained` finds it, in its own file or the config.

    Raises `CorruptCheckpointError`.
    """
    folder = checkpoint.fetch_side_files()
    name = "generation_config.json"
    own = (folder / name).is_file()
    given: dict[str, Any] = (
        {} if own else {"config_file_name": "config.json", "_from_model_config": True}
    )
    with convert_parse_errors(str(folder / (name if own else "config.json"))):
        config = GenerationConfig.from_pretrained(folder, local_files_only=True, **given)
    # Meant for local caches; here the nodes hold the cache.
    config.cache_implementation = None
    return config


def open_named_checkpoint(config: ClientConfig, name: str) -> Checkpoint:
    """Open the checkpoint `name`, a folder or hub name. Raises as `open_checkpoint` does."""
    return open_checkpoint(
        name, revision=config.revision, token=secret_text(config.token), cache_dir=config.cache_dir
    )


def open_model(
    config: ClientConfig,
    checkpoint: Checkpoint,
    *,
    discovered: bool = False,
    adapter: str | None = None,
) -> tuple[DistributedModelForCausalLM, PreTrainedTokenizerBase]:
    """Load the tokenizer, embedding and head of `checkpoint`. The caller closes the model.

    The swarm is joined with the first session; `adapter` is as in `from_pretrained`.
    `discovered` marks models chosen by untrusted peers:
    their tokenizers are restricted, and embedding and head must leave free memory
    (`require_room_for_embedder_and_head`). Raises what fetching files raises, and `ConfigError`.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if config.threads is not None:
        fix_threads(config.threads)
    dtype = checkpoint.resolve_dtype(config.torch_dtype)
    # Embedding and head are small: by default they stay in main memory.
    device = choose_device("cpu" if config.device == "auto" else config.device)
    if discovered:
        require_room_for_embedder_and_head(checkpoint, dtype=dtype, device=device)
    load = load_discovered_tokenizer if discovered else load_tokenizer
    folder = checkpoint.fetch_side_files()
    client_blocks = choose_client_blocks(config, checkpoint.num_blocks)
    if config.deployment is not None:
        client_blocks = read_client_blocks(config.deployment, checkpoint, client_blocks)
    with track_wait("the tokenizer to be loaded"):
        tokenizer = load(folder)
    model = build_model(
        checkpoint,
        connect_by(checkpoint, ConnectionOptions.from_settings(config), dtype),
        dtype=dtype,
        device=device,
        quant_type=config.client_quant_type,
        client_blocks=client_blocks,
        prefix_salt=choose_prefix_salt(config.reuse_prefix, None),
        adapter=adapter,
        drafting=open_drafting(
            config.draft,
            checkpoint,
            # A revision is that of the model itself.
            partial(open_checkpoint, token=secret_text(config.token), cache_dir=config.cache_dir),
            build_local_model,
            private=config.private,
            decisions_path=default_decisions_path(),
        ),
    )
    return model, tokenizer


def choose_client_blocks(config: ClientConfig, num_blocks: int) -> tuple[int, int]:
    """How many first and last blocks the client computes. Raises `ConfigError`."""
    if (private := config.private_blocks) is None:
        return config.client_blocks or (0, 0)
    if private.end > num_blocks:
        raise ConfigError(f"private_blocks={private} of a model that has blocks 0:{num_blocks}")
    return private.start, num_blocks - private.end


def read_client_blocks(
    deployment: Path, checkpoint: Checkpoint, asked: tuple[int, int]
) -> tuple[int, int]:
    """How many first and last blocks of a private deployment its owner computes.

    Raises `ConfigError` where something else was `asked`, and as `read_deployment` does.
    """
    from nesa_node.client.deployment.deployment_connection import read_deployment
    from nesa_node.client.deployment.deployment_file import DeploymentFile

    found = read_deployment(DeploymentFile(deployment), checkpoint).client_blocks
    if asked not in (found, (0, 0)):
        raise ConfigError(
            f"client_blocks={asked}, and the deployment leaves {found} to its owner: leave it out"
        )
    return found
