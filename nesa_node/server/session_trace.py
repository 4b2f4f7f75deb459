"""A node's part in the trace of a session, recorded for a chain if its client traces."""

from __future__ import annotations

from nesa_node.core import tracing
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import session_name
from nesa_node.core.span import Span as Blocks
from nesa_node.core.tracing import NO_SPAN, Span, TraceContext
from nesa_node.server.session import Session
from nesa_node.swarm.messages import Open


class NodeTrace:
    """Three trace spans per session, whatever its length: the session, its opening, its first step.

    The client's trace context is validated and used for nothing else.
    """

    def __init__(self, opened: Open, own: PeerId) -> None:
        parent = TraceContext.parse(opened.trace) if opened.mode == "chain" else None
        self._span = NO_SPAN if parent is None else _session_span(opened, own, parent)
        self._opening = self._part("open")

    def opened(self) -> None:
        """End the opening span: the client is being answered."""
        self._opening.end()

    def served(self, session: Session) -> None:
        """Record the session's totals before it closes."""
        if session.first_step is not None:
            began_at, ended_at = session.first_step
            self._part("first step", began_at).end(at=ended_at)
        self._span.set({"nesa.steps": session.steps, "nesa.tokens": sum(session.lengths)})

    def end(self, error: str | None = None) -> None:
        """End the trace. Only the first call counts."""
        self._opening.end(error=error)
        self._span.end(error=error)

    def _part(self, name: str, began_at: float | None = None) -> Span:
        context = self._span.context
        return NO_SPAN if context is None else tracing.start(name, context, began_at=began_at)


def _session_span(opened: Open, own: PeerId, parent: TraceContext) -> Span:
    return tracing.start(
        "node",
        parent,
        {
            "nesa.session": session_name(opened.session),
            "nesa.peer": own,
            "nesa.blocks": str(Blocks(*opened.blocks)),
            "nesa.rows": opened.rows,
        },
    )
