#!/usr/bin/python3
"""serve.py FRAMEWORK CLIENT: a service of test/clients/http/play. Prints its port."""

import importlib
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../../../../clients/python"))

from clients import CLIENTS  # noqa: E402
from service import Service  # noqa: E402


def main(framework, client):
    service = Service(CLIENTS[client](os.environ["PGHOST"]), CLIENTS[client]("/nonexistent"))
    importlib.import_module(f"service_of_{framework}").serve(service)


if __name__ == "__main__":
    main(*sys.argv[1:])
