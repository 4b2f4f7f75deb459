"""Reader of a causal LM's module tree: what tells a node how to run some of its layers.

The model is made on the meta device, where tensors have shapes and no memory, and run once. So its
own code says which shapes each layer caches, and whether anything but hidden states passes between
layers. A config is untrusted: time and memory depend on its number of blocks alone.

L tokens, P tokens before them, D hidden, H key/value heads, E head size.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from nesa_node.core.errors import UnsupportedModelError
from nesa_node.engine.weights.families import CacheHeads, ModelFamily, ModelTree

_AUTO: Any = AutoModelForCausalLM
initializer_lock = threading.Lock()
"""Guards torch's initializers, which `no_init_weights` patches for all threads while a network in
pieces is made (`engine/graphs/model_graph.py`). Of two threads inside it, the second to leave would
restore the first one's patches for good; and a thread that initializes weights meanwhile would find
that nothing does so."""
_TOKENS, _PAST = 4, 3
_PROBED_ATTENTION = "nesa_probe"
_FAR = 1 << 40
"""A distance between tokens beyond any window."""
_LAYER_INPUTS = frozenset(
    {
        *("attention_mask", "causal_mask", "mask", "head_mask", "alibi", "position_bias"),
        *("position_ids", "cache_position", "position_embeddings", "use_cache"),
        *("past_key_values", "past_key_value", "layer_past", "output_attentions"),
    }
)
"""Arguments of a layer that the decoder makes of positions and lengths alone."""
_CROSS_ATTENTION = frozenset({"encoder_attn", "cross_attn", "crossattention", "cross_attention"})
_PACKED_KEYS = frozenset(
    ("packed", "scaling", "sliding_window", "softcap", "s_aux", "dropout", "is_causal")
)
"""Arguments of the attention interface that attention over pages knows."""
_IGNORED_KEYS = frozenset({"position_ids", "use_cache", "cache_position", "output_attentions"})
"""Further ones, with which no attention computes."""


class MisfitError(Exception):
    """A model is no plain stack of decoder layers; the text says why."""


class _NoInitializers(TorchFunctionMode):
    """Most initializers are not called in this thread: on the meta device they would write nothing.

    transformers' `no_init_weights` patches them for all threads, and for good where another one
    loads a model meanwhile.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if getattr(func, "__module__", None) == torch.nn.init.__name__:
            return args[0] if args else options["tensor"]
        return func(*args, **options)


def make_empty_model(config: Any) -> Any:
    """Causal LM of a config on the meta device, in evaluation mode. The config is not changed.

    Raises `UnsupportedModelError` for a config of which transformers can make none.
    """
    # Building a model changes its config.
    own = copy.deepcopy(config)
    try:
        with torch.device("meta"), _NoInitializers():
            model: Any = _AUTO.from_config(own, trust_remote_code=False)
    except Exception as error:
        # A checkpoint's config reaches any line of transformers' modules.
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModelError(
            f"transformers cannot make a model of this {config.model_type} config: {reason}"
        ) from error
    model.eval()
    return model


def read_family(config: Any) -> ModelFamily:
    """Return what a node has to know of a model that is in no table. Takes about a second.

    Raises `MisfitError` for what is no stack of decoder layers between embedding and head, or keeps
    something else than keys and values of each token, and what `make_empty_model` raises.
    """
    _require_one_decoder(config)
    probed = copy.deepcopy(config)
    _use_plain_rope(probed)
    return _read_tree(make_empty_model(probed), probed)


def _require_one_decoder(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise MisfitError("it is an encoder-decoder")
    towers = [name for name in config.sub_configs if "vision" in name or "audio" in name]
    if towers or config.get_text_config(decoder=True) is not config:
        raise MisfitError("its config describes several networks, of which text is one")
    for name in ("num_hidden_layers", "hidden_size"):
        if not isinstance(getattr(config, name, None), int):
            raise MisfitError(f"its config states no {name}")


def _read_tree(model: Any, config: Any) -> ModelFamily:
    path = _find_layers(model, int(config.num_hidden_layers))
    decoder_path, _, layers_name = path.rpartition(".")
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise MisfitError("its head is no single matrix")
    decoder, layers = model.get_submodule(decoder_path), list(model.get_submodule(path))
    _require_loadable(model, layers)
    router, reads_router = _find_router(layers)
    _replace_experts(layers)
    probe = _run(decoder, layers, int(config.hidden_size))
    return ModelFamily(
        str(config.model_type),
        decoder=decoder_path,
        layers_name=layers_name,
        head=next(name for name, module in model.named_modules() if module is head),
        tree=ModelTree(probe.cache_heads(), probe.output_length),
        router=router,
        reads_router=reads_router,
        packs_rows=_packs_rows(model, decoder, layers, int(config.hidden_size)),
        separates_texts=False,
    )


def _require_loadable(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Raises `MisfitError` for encoders' readers, and tensors that no checkpoint can hold."""
    for layer in layers:
        if any(name in _CROSS_ATTENTION for name, _ in layer.named_children()):
            raise MisfitError("its layers attend to an encoder")
    for module in model.modules():
        if any(isinstance(value, Tensor) for value in vars(module).values()):
            raise MisfitError(f"{type(module).__name__} keeps a tensor that is no buffer")


def _find_layers(model: nn.Module, count: int) -> str:
    """Path of the list of layers. Raises `MisfitError` unless there is exactly one."""
    lists: list[str] = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    outer = [name for name in lists if not any(name.startswith(f"{each}.") for each in lists)]
    if len(outer) != 1 or "." not in outer[0]:
        raise MisfitError(f"it has {len(outer)} stacks of {count} layers, not one")
    decoder = model.get_submodule(outer[0].rpartition(".")[0])
    if "inputs_embeds" not in inspect.signature(type(decoder).forward).parameters:
        raise MisfitError("its layers belong to an encoder, which takes no embeddings")
    return outer[0]


def _find_router(layers: Sequence[nn.Module]) -> tuple[str | None, bool]:
    """Path of the router in a layer, if there are experts, and whether its logits alone decide."""
    for layer in layers:
        for path, _ in layer.named_modules():
            if path.rpartition(".")[2] != "experts":
                continue
            block, _, _ = path.rpartition(".")
            parent = layer.get_submodule(block)
            for name in ("gate", "router"):
                found = getattr(parent, name, None)
                if isinstance(found, nn.Module):
                    return f"{block}.{name}".lstrip("."), _decides_by_logits(found, parent)
            return block, False
    return None, True


def _decides_by_logits(router: nn.Module, parent: nn.Module) -> bool:
    """Whether a router takes the experts with the largest logits, without corrections or groups."""
    own = {name for name, _ in (*router.named_parameters(), *router.named_buffers())}
    beside = [*parent._parameters, *parent._buffers]
    groups = getattr(router, "num_group", None) or getattr(router, "n_group", None)
    return own <= {"weight", "bias"} and not beside and (groups or 1) == 1


def _replace_experts(layers: Sequence[nn.Module]) -> None:
    """Let experts return their input: which tokens they get depends on values, which are none."""
    for layer in layers:
        for path, module in layer.named_modules():
            if path.rpartition(".")[2] == "experts":
                module.forward = _return_first


def _return_first(hidden: Tensor, *_: object, **__: object) -> Tensor:
    return hidden


def _use_plain_rope(config: Any) -> None:
    """Let frequencies not depend on positions, whose values the meta device has not."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            parameters["rope_type"] = "default"


class _ProbeCache:
    """Records the shapes that layers cache. Its methods are those of `RowCache`, no more."""

    def __init__(self) -> None:
        self.layer = -1
        """The layer that runs."""
        self.heads: dict[int, CacheHeads] = {}
        self.returned: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, keys_1HLE: Tensor, values_1HLE: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        if layer_idx != self.layer or layer_idx in self.heads:
            raise MisfitError("its layers share caches")
        sides = (keys_1HLE, values_1HLE)
        if any(side.ndim != 4 or side.shape[::2] != (1, _TOKENS) for side in sides):
            raise MisfitError("it caches something else than keys and values of each token")
        keys, values = ((int(side.shape[1]), int(side.shape[3])) for side in sides)
        self.heads[layer_idx] = CacheHeads(*keys, values=None if values == keys else values)
        all_1HCE = (
            side.new_empty(1, side.shape[1], _PAST + _TOKENS, side.shape[3]) for side in sides
        )
        self.returned[layer_idx] = (next(all_1HCE), next(all_1HCE))
        return self.returned[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return _PAST

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return _PAST

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return _PAST + query_length, 0


class _Probe:
    """One pass through a decoder, watched between its layers."""

    def __init__(self, layers: Sequence[nn.Module], hidden_size: int) -> None:
        self.cache = _ProbeCache()
        self.output_length = 0
        self._layers = layers
        self._hidden_size = hidden_size
        self._last: Tensor | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for index, layer in enumerate(self._layers):
                before = layer.register_forward_pre_hook(
                    partial(self._enter, index), with_kwargs=True
                )
                stack.callback(before.remove)
                stack.callback(layer.register_forward_hook(self._leave).remove)
            yield

    def _enter(
        self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        (_, hidden), *given = name_arguments(layer, args, kwargs)
        if tuple(hidden.shape) != (1, _TOKENS, self._hidden_size):
            raise MisfitError("its layers pass on more than one hidden state of each token")
        if self._last is not None and hidden is not self._last:
            raise MisfitError("its decoder computes with hidden states between layers")
        for name, value in given:
            if isinstance(value, Tensor) and name not in _LAYER_INPUTS:
                raise MisfitError(f"its layers take {name} beside hidden states")
        self.cache.layer = index

    def _leave(self, _: nn.Module, __: object, output: Any) -> None:
        self.output_length = len(output) if isinstance(output, tuple) else 0
        self._last = output[0] if isinstance(output, tuple) else output

    def cache_heads(self) -> tuple[CacheHeads, ...]:
        """Shape of each layer's cache. Raises `MisfitError` if a layer has none."""
        if len(self.cache.heads) != len(self._layers):
            raise MisfitError(
                "it has recurrent layers: they keep a state of a session, not keys and values"
            )
        return tuple(self.cache.heads[index] for index in range(len(self._layers)))


def name_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Return a layer's arguments with their names, those of `**kwargs` included, in order."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    named: list[tuple[str, Any]] = []
    for name, value in list(bound.items())[1:]:
        named += value.items() if name == "kwargs" else [(name, value)]
    return named


def _run(decoder: Any, layers: Sequence[nn.Module], hidden_size: int, **extra: Any) -> _Probe:
    """Run the decoder on hidden states. Raises `MisfitError` if it does not accept them."""
    probe = _Probe(layers, hidden_size)
    embeds_1LD = torch.empty(1, _TOKENS, hidden_size, device="meta")
    positions_1L = torch.arange(_PAST, _PAST + _TOKENS, device="meta")[None]
    try:
        with torch.no_grad(), probe.watching():
            decoder(
                inputs_embeds=embeds_1LD,
                position_ids=positions_1L,
                past_key_values=probe.cache,
                use_cache=True,
                **extra,
            )
    except MisfitError:
        raise
    except Exception as error:
        # Any line of a model's own code may meet something that it does not expect.
        raise MisfitError(_explain(error)) from error
    return probe


def _explain(error: Exception) -> str:
    """Why a decoder could not be run with `_ProbeCache` on tensors without values."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, AttributeError) and isinstance(error.obj, _ProbeCache):
        if "indexer" in str(error.name):
            return (
                "its attention chooses tokens by an index, which it caches beside keys and values"
            )
        return "it has recurrent layers: they keep a state of a session beside keys and values"
    if _ProbeCache.__name__ in text:
        return "it accepts no cache but its own, which has more than keys and values"
    if isinstance(error, NotImplementedError):
        return "its decoder decides by values of tokens what it computes"
    return f"its decoder does not run on hidden states alone ({text})"


def _packs_rows(model: Any, decoder: Any, layers: Sequence[nn.Module], hidden_size: int) -> bool:
    """Whether attention over pages can stand in for each layer's: then rows are run together.

    It can where a layer hands what it cached, unchanged, to transformers' attention interface, with
    arguments that attention over pages knows, and a mask that these describe.
    """
    watch = _AttentionWatch()
    with _watch_lock:
        AttentionInterface.register(_PROBED_ATTENTION, watch.attend)
        AttentionMaskInterface.register(_PROBED_ATTENTION, watch.make_mask)
        before = model.config._attn_implementation
        model.config._attn_implementation = _PROBED_ATTENTION
        try:
            probe = _run(decoder, layers, hidden_size, packed=watch)
        except MisfitError:
            return False
        finally:
            model.config._attn_implementation = before
    returned = probe.cache.returned
    return sorted(watch.seen) == sorted(returned) and all(
        key is returned[index][0] and value is returned[index][1]
        for index, (key, value) in watch.seen.items()
    )


_watch_lock = threading.Lock()


class _AttentionWatch:
    """Stand-in for transformers' attention, which notes what layers hand to it."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[int, tuple[Tensor, int | None]] = {}
        """Masks, which are kept so that their ids are, and the window of each."""

    def make_mask(
        self, *, mask_function: Callable[..., Any], q_length: int, kv_length: int, **_: Any
    ) -> Tensor:
        mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        self._masks[id(mask)] = (mask, _find_window(mask_function))
        return mask

    def attend(
        self,
        module: Any,
        query_1QLE: Tensor,
        key_1HCE: Tensor,
        value_1HCE: Tensor,
        attention_mask: Tensor | None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        used = {key for key, value in given.items() if value is not None} - _IGNORED_KEYS
        index = module.layer_idx
        mask = self._masks.get(id(attention_mask))
        if (
            index in self.seen
            or not used <= _PACKED_KEYS
            or given.get("packed") is not self
            or mask is None
            or given.get("sliding_window") != mask[1]
            or value_1HCE.shape != key_1HCE.shape
            or query_1QLE.shape[3] != key_1HCE.shape[3]
        ):
            raise MisfitError("its attention is its own")
        self.seen[index] = (key_1HCE, value_1HCE)
        return query_1QLE.transpose(1, 2), None


def _find_window(sees: Callable[..., Any]) -> int | None:
    """Return how many tokens up to its own a query sees by transformers' mask function; None: all.

    Raises `MisfitError` for a mask that is no window, such as one of chunks.
    """

    def is_seen(distance: int) -> bool:
        zero, query = torch.tensor(0), torch.tensor(_FAR)
        return bool(sees(zero, zero, query, query - distance))

    if is_seen(_FAR):
        return None
    low, high = 0, _FAR  # seen, and not seen
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_seen(middle) else (low, middle)
    # A chunk ends at a multiple of its size, a window does not: look from another place.
    zero, query = torch.tensor(0), torch.tensor(_FAR + 1)
    if bool(sees(zero, zero, query, query - low)) and not bool(
        sees(zero, zero, query, query - high)
    ):
        return high
    raise MisfitError("its masks are no windows")
