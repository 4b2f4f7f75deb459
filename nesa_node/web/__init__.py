"""HTTP serving: listening, authentication, limits, and metrics, shared by API and dashboard."""
