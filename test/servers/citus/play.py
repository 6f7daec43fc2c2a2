#!/usr/bin/python3
"""
play.py directory
    Runs all checks on a cluster in that directory.
"""

import os
import sys
import time
import traceback

import checks
import storm
from cluster import COORDINATOR, PORTS, Cluster


def main(directory):
    """main runs the checks, and returns the exit code."""
    cluster = Cluster(directory, os.environ["BINDIR"])
    passed = failed = 0
    try:
        cluster.create()
        # Default privileges of each node, which the portable edition must revoke
        cluster.execute(COORDINATOR, "CREATE ROLE anybody LOGIN")
        for port in PORTS:
            for kind in ("FUNCTIONS", "TABLES", "TYPES", "SCHEMAS"):
                cluster.execute(port, f"ALTER DEFAULT PRIVILEGES GRANT ALL ON {kind} TO anybody")
        portable = os.path.join(directory, "portable")
        cluster.psql(COORDINATOR, f"--file={portable}/idempotency.sql", f"--file={portable}/citus.sql",
                     PGOPTIONS="-c citus.enable_ddl_propagation=off")
        cluster.psql(COORDINATOR, f"--file={directory}/test/servers/citus/schema.sql")
        for name, check in (
                ("again", checks.check_again),
                ("forms", lambda cluster: checks.check_forms(cluster, False)),
                ("forms-moved", lambda cluster: checks.check_forms(cluster, True)),
                ("guard", checks.check_guard),
                ("leases", checks.check_leases),
                ("waits", checks.check_waits),
                ("inbox", checks.check_inbox),
                ("restored", checks.check_restored),
                ("privileges", checks.check_privileges),
                ("roles", checks.check_roles),
                ("owner", checks.check_owner),
                ("cost", checks.check_cost),
                ("control", storm.check_control),
                ("storm", storm.check_storm)):
            if os.environ.get("ONLY") and name not in os.environ["ONLY"].split():
                continue
            began = time.monotonic()
            try:
                wrong, figures = check(cluster)
            except Exception:  # pylint: disable=broad-except
                wrong, figures = [traceback.format_exc()], ""
            passed, failed = passed + (not wrong), failed + bool(wrong)
            print(f"{'FAILED  ' if wrong else 'ok      '} citus/{name}: {figures} ({time.monotonic() - began:.0f} s)", flush=True)
            for line in wrong[:20]:
                print("        ", line)
    finally:
        cluster.stop()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
