"""Import of hivemind, without the side effects of its import.

hivemind installs a log handler that prints to stderr, renames the WARNING level for the whole
process and uses a deprecated call of torch. Here its errors go to structlog and the rest is undone.
"""

import logging
import warnings

from nesa_node.core.logging import get_logger

log = get_logger(__name__)

_level_name = logging.getLevelName(logging.WARNING)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from google.protobuf.message import DecodeError
    from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
    from hivemind.dht.node import Blacklist
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
    from hivemind.hivemind_cli import __file__ as _cli_file
    from hivemind.p2p import P2PContext, PeerID
    from hivemind.proto import dht_pb2, p2pd_pb2
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr
    from hivemind.utils.serializer import MSGPackSerializer
    from hivemind.utils.timed_storage import TimedStorage, ValueWithExpiration
logging.addLevelName(logging.WARNING, _level_name)

P2PD_PATH = _cli_file.removesuffix("__init__.py") + "p2pd"

__all__ = [
    "DHTID",
    "P2PD_PATH",
    "Blacklist",
    "DHTLocalStorage",
    "DHTProtocol",
    "DHTRecord",
    "DecodeError",
    "DictionaryDHTValue",
    "MSGPackSerializer",
    "Multiaddr",
    "P2PContext",
    "PeerID",
    "RecordValidatorBase",
    "TimedStorage",
    "ValueWithExpiration",
    "dht_pb2",
    "p2pd_pb2",
]


class _StructlogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log.error("hivemind_error", message=record.getMessage(), where=record.name)


use_hivemind_log_handler("nowhere")
_hivemind = logging.getLogger("hivemind")
_hivemind.addHandler(_StructlogHandler(level=logging.ERROR))
_hivemind.setLevel(logging.ERROR)
_hivemind.propagate = False
