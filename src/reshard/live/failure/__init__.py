"""Every wait ends, and all ranks of a call raise the same cause.

watch        one call's waits, timeouts and failure
agreement    ranks meet in the session's store, and compare their plans
cleanup      end the calls that an exception has interrupted
"""
