"""`python -m tests.serving_stub NAME PLAN`: a system of the serving benchmark that measures nothing, for tests of what runs it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    sys.stderr.write("this is its log\n")
    gate = Path(os.environ["TENANTRY_BENCH_GATE"])
    while not gate.exists():
        time.sleep(0.01)
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
    say({"ready_s": 0.1, "about": {"helper": helper.pid, "name": sys.argv[1], "seed": os.environ["TENANTRY_BENCH_SEED"]}})
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "die":
            sys.stderr.write("out of memory\n")
            sys.exit(1)
        if order["do"] != "hang":
            say({"error": "no such batch"} if order["do"] == "fail" else {"got": order})


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
