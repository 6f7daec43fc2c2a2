"""
journal.py
    The history of a round, written outside of the database.

Each record is one line of JSON, in the order of the journal's lock, which is the real
order: a client writes a step before it sends the call, and the result after the reply.
A record is flushed before note() returns; concurrent writers share a flush.
"""

import json
import os
import threading
import time


class Journal:
    """The journal that all clients of a round share."""

    def __init__(self, path):
        self.file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self.write_lock = threading.Lock()
        self.flush_lock = threading.Lock()
        self.written = 0
        self.flushed = 0

    def note(self, what, **record):
        """note writes a record, and returns its number once it is flushed."""
        with self.write_lock:
            self.written += 1
            number = self.written
            record.update(what=what, i=number, at=round(time.monotonic(), 4))
            os.write(self.file, (json.dumps(record) + "\n").encode())
        with self.flush_lock:
            if self.flushed < number:
                written = self.written
                os.fdatasync(self.file)
                self.flushed = written
        return number

    def close(self):
        """close closes the file."""
        os.close(self.file)


def load(path):
    """load returns the records of a journal."""
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
