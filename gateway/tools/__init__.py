"""Tool calls: which functions a request offers, how models write calls, and how calls are read out of an answer."""
