"""Tool calls: which functions a request offers, how models write calls, and how calls are read out of an answer."""

from gateway.tools.refusal import refuse_tools

__all__ = ["refuse_tools"]
