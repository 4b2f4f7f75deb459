"""A node's part in the trace of a session, recorded for a chain if its client traces."""

from __future__ import annotations

from nesa_node.core import tracing
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import session_name
from nesa_node.core.span import Span
from nesa_node.core.tracing import NO_SPAN, TraceContext, TraceSpan
from nesa_node.server.session.session import Session
from nesa_node.swarm.protocol.messages import Open


class NodeTrace:
    """Three trace spans per session, whatever its length: the session, its opening, its first step.

    The client's trace context is validated and used for nothing else.
    """

    def __init__(self, opened: Open, own_peer: PeerId) -> None:
        parent = TraceContext.parse(opened.trace) if opened.mode == "chain" else None
        self._span = NO_SPAN if parent is None else _session_span(opened, own_peer, parent)
        self._open_span = self._start_child("open")

    def end_opening(self) -> None:
        """End the opening span: the client is being answered."""
        self._open_span.end()

    def record_session(self, session: Session) -> None:
        """Record the session's totals before it closes."""
        if session.first_step_times is not None:
            began_at, ended_at = session.first_step_times
            self._start_child("first step", began_at).end(at=ended_at)
        self._span.set_attributes(
            {"nesa.steps": session.emitted_steps, "nesa.tokens": sum(session.state.lengths)}
        )

    def end(self, error: str | None = None) -> None:
        """End the trace. Only the first call counts."""
        self._open_span.end(error=error)
        self._span.end(error=error)

    def _start_child(self, name: str, began_at: float | None = None) -> TraceSpan:
        context = self._span.context
        return NO_SPAN if context is None else tracing.start_span(name, context, began_at=began_at)


def _session_span(opened: Open, own: PeerId, parent: TraceContext) -> TraceSpan:
    return tracing.start_span(
        "node",
        parent,
        {
            "nesa.session": session_name(opened.session),
            "nesa.peer": own,
            "nesa.blocks": str(Span(*opened.blocks)),
            "nesa.rows": opened.rows,
        },
    )
