"""Checksums and digests: has a byte changed since it was written?"""
