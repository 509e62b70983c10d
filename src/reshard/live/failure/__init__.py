"""Waits that end, and causes that all ranks of a call learn.

watch       one call's waits, timeouts and failure
abort       post a cause, tell all ranks, keep writers out
wait_graph  who waits for whom, and deadlocks between sessions
agreement   compare what ranks were given
cleanup     account for calls that an exception has left
"""
