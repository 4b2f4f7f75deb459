"""Masks that nodes have multiplied, unread, before there is anything to hide with them.

T tokens, I inputs, O outputs, N degree.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nesa_node.client.private.private_link import MaskProduct
from nesa_node.client.private.private_nodes import PrivateNodes
from nesa_node.core.errors import NesaError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.privacy.ciphertext import FreshCiphertext
from nesa_node.privacy.masked_product import Integers, Masked, MaskLayout, hide
from nesa_node.privacy.ring import Ring
from nesa_node.privacy.sampling import random_masks
from nesa_node.privacy.secret_key import SecretKey

log = get_logger(__name__)

FILL_TOKENS = 4
"""Masks of one request that fills the stock: a node that a step asks meanwhile is busy with it."""
FILL_AFTER_S = 0.5
"""Without a step of any session: between a session's steps its next one needs the nodes."""
RETRY_S = 5.0
"""Until nodes are looked for again, where none multiplied masks."""


class Mask:
    """Random numbers [I] that hide one vector, and their product [O]."""

    def __init__(self, numbers_I: Masked, product_O: Masked, maker: PeerId) -> None:
        self._numbers_I: Masked | None = numbers_I
        self.product_O = product_O
        self.maker = maker
        """The node whose product it is."""

    def hide(self, x_I: Integers) -> Masked:
        """What may be sent of x, as often as need be. The mask hides nothing else after it."""
        numbers_I, self._numbers_I = self._numbers_I, None
        if numbers_I is None:
            raise AssertionError("a mask hides one vector")
        return hide(x_I, numbers_I)


@dataclass(frozen=True, slots=True)
class MaskedProduct:
    """A product whose inputs masks hide."""

    path: str
    block: int
    layout: MaskLayout


async def make_masks(
    nodes: PrivateNodes, ring: Ring, product: MaskedProduct, count: int
) -> list[Mask]:
    """Have `nodes` multiply so many masks. Raises what asking them raises."""
    secret, layout = nodes.secret, product.layout
    numbers_TI = random_masks(count, layout.inputs)

    def encrypt() -> list[list[FreshCiphertext]]:
        return [
            [secret.encrypt_mask(chunk) for chunk in layout.split(numbers, ring.degree)]
            for numbers in numbers_TI
        ]

    tokens = await asyncio.to_thread(encrypt)
    peer, answers = await nodes.ask(
        product.block, lambda link: link.multiply_masks(product.path, layout, tokens)
    )
    products = [await asyncio.to_thread(_decrypt, secret, layout, answer) for answer in answers]
    return [Mask(*pair, peer) for pair in zip(numbers_TI, products, strict=True)]


class MaskStock:
    """Masks of a connection's products, for all of its sessions. Of any thread but for `fill`."""

    def __init__(
        self, nodes: PrivateNodes, ring: Ring, tokens: int, barred: Container[PeerId]
    ) -> None:
        """Hold masks for `tokens` tokens, made while no session computes. Of nodes that are
        `barred` by the time none is used.
        """
        self._nodes = nodes
        self._ring = ring
        self._tokens = tokens
        self._barred = barred
        self._lock = threading.Lock()
        self._masks: dict[MaskedProduct, deque[Mask]] = {}
        self._steps = 0
        self._step_ended = -math.inf
        self._wanted = asyncio.Event()
        """Set while no step is computed, and masks may be missing."""

    def add_product(self, product: MaskedProduct) -> None:
        with self._lock:
            self._masks.setdefault(product, deque())

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Fill nothing while this is entered, in the event loop: a session needs the nodes."""
        self._steps += 1
        self._wanted.clear()
        try:
            yield
        finally:
            self._steps -= 1
            self._step_ended = time.monotonic()
            if not self._steps:
                self._wanted.set()

    @property
    def kept(self) -> int:
        """Tokens that the masks suffice for."""
        with self._lock:
            return min(map(len, self._masks.values()), default=0)

    def take(self, product: MaskedProduct, count: int) -> list[Mask]:
        """Up to so many masks, as many as there are."""
        with self._lock:
            masks = self._masks[product]
            taken: list[Mask] = []
            while masks and len(taken) < count:
                mask = masks.popleft()
                if mask.maker not in self._barred:
                    taken.append(mask)
            return taken

    async def fill(self) -> None:
        """Make masks while no session computes, of the product with the fewest first."""
        paused: dict[MaskedProduct, float] = {}
        while True:
            await self._wanted.wait()
            now = time.monotonic()
            if now < (at := self._step_ended + FILL_AFTER_S):
                await asyncio.sleep(at - now)
                continue
            with self._lock:
                counts = {each: len(masks) for each, masks in self._masks.items()}
            missing = [each for each, count in counts.items() if count < self._tokens]
            asked = [each for each in missing if now >= paused.get(each, now)]
            if not missing:
                self._wanted.clear()
            elif not asked:
                await asyncio.sleep(RETRY_S)
            else:
                product = min(asked, key=counts.__getitem__)
                count = min(self._tokens - counts[product], FILL_TOKENS)
                try:
                    masks = await make_masks(self._nodes, self._ring, product, count)
                except NesaError as error:
                    log.info("masks_not_made", path=product.path, reason=str(error))
                    paused[product] = time.monotonic() + RETRY_S
                else:
                    with self._lock:
                        self._masks[product].extend(masks)


def _decrypt(secret: SecretKey, layout: MaskLayout, answer: MaskProduct) -> Masked:
    numbers_BR = secret.decrypt_products(*answer, layout.places)
    return numbers_BR.reshape(-1)[: layout.outputs]
