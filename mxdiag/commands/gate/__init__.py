"""`mxdiag gate`: error budgets, read by `parse`, judged by `evaluate`, written by `suggest`."""
